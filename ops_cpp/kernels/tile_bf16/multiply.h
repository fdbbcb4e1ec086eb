// tile_bf16, the products in AMX tiles, which know nothing of vectors.
//
// Up to 32 tokens: two tiles of rows meet their one or two panels. For each product that makes 1.5 loads with one
// panel, or 1 with two terms, and 1 with two panels, or 0.75. More tokens: one tile of rows meets up to five panels. So
// every weight is loaded once for 80 tokens. The sums come first among the tiles, then the rows, then the tokens; 7 are
// those of the last panel, which may be narrower. No more tiles of sums are needed: a product that adds to the sums of
// the one before it does not wait for them (16 cycles each).
//
// The 32 rows of two tiles are as many streams, which is how many the prefetcher of the L2 cache follows. Rows of a
// tile are spread over the part, for each stream to have pages of its own, which the next tile goes on with.
// docs/amx.md has what other numbers of tiles read from memory, as measured: four and six load less and are slower,
// even when the rows that come next are asked for in advance.
//
// Measured 2026-11-30, Emerald Rapids VM, one thread, while AMX ran at its full rate (2640 GFLOP/s; neighbours on the
// host take three quarters of it for minutes), k = 768 / 2048, rows in L2, one tile of them, GFLOP/s (the limit are 48
// bytes a cycle from L2): 16 tokens 850 / 800, 32 tokens 990 / 1070, 64 tokens 1190 / 1290 (49 % of the peak); two
// tiles: 32 tokens 1230 / 1350.
#pragma once

#include <cstring>

#include "kernels/tile/amx.h"
#include "kernels/tile/tile.h"
#include "kernels/tile_bf16/layout.h"

namespace hina {
namespace {

constexpr int kMostPanels = 5;  // at a time, with one tile of rows
constexpr int kPairPanels = 2;  // with two
constexpr int kTokenTile = 6, kLastTokenTile = 7;

using amx::Constant;

// f(Constant<0>), f(Constant<1>) .. : tiles are named by constants.
template <int n, int i = 0, typename F>
HINA_INLINE void unroll(F f) {
  if constexpr (i < n) {
    f(Constant<i>());
    unroll<n, i + 1>(f);
  }
}

// Tiles of rows: `at`, at + step .. among those of both parts, which are `stride` bytes apart; and if there is another
// tile, it begins `apart` steps later.
struct RowTiles {
  const char* first;
  int64_t stride;
  int tiles, n;  // how many, and rows of each
  int64_t at, step;
  int apart;
};

// Number i of what is multiplied at a time of a part: `most` tiles. The rows that are left come with some before them
// where there are any, which then have the same results twice.
HINA_INLINE RowTiles row_tiles(const TileRows& part, int64_t at, int most, int i) {
  const char* first = static_cast<const char*>(part.first);
  const int whole = part.n / (most * kTileRows), left = part.n - whole * most * kTileRows;
  if (i < whole) return {first + i * part.stride, whole * part.stride, most, kTileRows, at + i, whole, kTileRows};
  const int n = part.n < kTileRows ? part.n : kTileRows, tiles = left > kTileRows ? 2 : 1;
  const int apart = tiles == 1 ? 0 : part.n < 2 * kTileRows ? part.n - kTileRows : kTileRows, from = part.n - n - apart;
  return {first + from * part.stride, part.stride, tiles, n, at + from, 1, apart};
}

// The last values of each row, when they do not fill a step, and zeros behind them.
struct alignas(64) Tail {
  char bytes[2 * kTileRows][64];

  HINA_INLINE void copy(const RowTiles& rows, int64_t k) {
    const int64_t whole = k / kStep * kStep;
    std::memset(bytes, 0, sizeof bytes);
    for (int tile = 0; tile < rows.tiles; ++tile)
      for (int r = 0; r < rows.n; ++r)
        std::memcpy(bytes[tile * kTileRows + r], rows.first + (tile * rows.apart + r) * rows.stride + whole * 2,
                    static_cast<size_t>(k - whole) * 2);
  }
};

struct Panel {
  const char* first;
  float* out;
  int64_t n;
};

// All panels but the last have as many tokens.
template <int kRowTiles, int kPanels>
HINA_INLINE void configure(int n_rows, const Panel* panels, amx::Config& loaded) {
  const auto bytes = [&](int p) HINA_INLINE_LAMBDA { return static_cast<int>(panels[p].n * 4); };
  amx::Config config;
  for (int i = 0; i < kRowTiles * kPanels; ++i) config.shape(i, n_rows, bytes(i / kRowTiles));
  for (int i = 0; i < kRowTiles; ++i) config.shape(kRowTiles * kPanels + i, n_rows, 64);
  config.shape(kTokenTile, kStepGroups, bytes(0));
  config.shape(kLastTokenTile, kStepGroups, bytes(kPanels - 1));
  if (std::memcmp(&config, &loaded, sizeof config) == 0) return;
  loaded = config;
  amx::configure(config);
}

template <int kRowTiles, int kPanels, int terms>
__attribute__((noinline)) void multiply_tiles(const RowTiles& rows, const Tail& tail, const Panel* panels, int64_t k) {
  constexpr int kRowTile = kRowTiles * kPanels;
  static_assert(kRowTile + kRowTiles <= kTokenTile);
  const char* token[kPanels];
  int64_t token_stride[kPanels];
  unroll<kPanels>([&](auto p) HINA_INLINE_LAMBDA {
    token[p.value] = panels[p.value].first;
    token_stride[p.value] = panels[p.value].n * 4;
  });
  const int64_t apart = rows.apart * rows.stride;
  const auto step = [&](const char* row, int64_t stride, int64_t apart) HINA_INLINE_LAMBDA {
    unroll<terms>([&](auto term) HINA_INLINE_LAMBDA {
      unroll<kRowTiles>([&](auto r) HINA_INLINE_LAMBDA {
        if constexpr (term.value == 0) amx::load<kRowTile + r.value>(row + r.value * apart, stride);
        unroll<kPanels>([&](auto p) HINA_INLINE_LAMBDA {
          constexpr int kTile = p.value == kPanels - 1 ? kLastTokenTile : kTokenTile;
          if constexpr (r.value == 0) {
            amx::load<kTile>(token[p.value], token_stride[p.value]);
            token[p.value] += kStepGroups * token_stride[p.value];
          }
          amx::multiply_bf16<p.value * kRowTiles + r.value, kRowTile + r.value, kTile>();
        });
      });
    });
  };
  unroll<kRowTile>([](auto sums) HINA_INLINE_LAMBDA { amx::zero<sums.value>(); });
  for (int64_t i = 0; i < k / kStep; ++i) step(rows.first + i * kStep * 2, rows.stride, apart);
  if (k % kStep != 0) step(tail.bytes[0], 64, sizeof tail.bytes / 2);
  unroll<kRowTile>([&](auto sums) HINA_INLINE_LAMBDA {
    const Panel& panel = panels[sums.value / kRowTiles];
    const int64_t at = rows.at + sums.value % kRowTiles * rows.apart * rows.step;
    amx::store<sums.value>(panel.out + at * panel.n, rows.step * panel.n * 4);
  });
}

template <int terms, int kRowTiles, int kPanels = 1>
HINA_INLINE void multiply_panels(const RowTiles& rows, const Tail& tail, const Panel* panels, int n_panels, int64_t k,
                                 amx::Config& loaded) {
  if (n_panels == kPanels) {
    configure<kRowTiles, kPanels>(rows.n, panels, loaded);
    multiply_tiles<kRowTiles, kPanels, terms>(rows, tail, panels, k);
  } else if constexpr (kPanels < (kRowTiles == 1 ? kMostPanels : kPairPanels)) {
    multiply_panels<terms, kRowTiles, kPanels + 1>(rows, tail, panels, n_panels, k, loaded);
  }
}

template <int terms>
void multiply(const TileRows* parts, const void* const* panels, int n_tokens, int64_t k, float* out) {
  const int n_panels = (n_tokens + kPanelTokens - 1) / kPanelTokens, most = n_panels <= kPairPanels ? 2 : 1;
  const int64_t n_rows = parts[0].n + parts[1].n;
  const auto panel = [&](int p) HINA_INLINE_LAMBDA -> Panel {
    const int first = p * kPanelTokens, left = n_tokens - first;
    return {static_cast<const char*>(panels[p]), out + first * n_rows, left < kPanelTokens ? left : kPanelTokens};
  };
  amx::Config loaded;
  Tail tail;
  for (int part = 0; part < 2; ++part) {
    for (int i = 0; i * most * kTileRows < parts[part].n; ++i) {
      const RowTiles rows = row_tiles(parts[part], part * parts[0].n, most, i);
      if (k % kStep != 0) tail.copy(rows, k);
      // Pieces of about the same size.
      for (int p = 0, pieces = (n_panels + kMostPanels - 1) / kMostPanels; pieces > 0; --pieces) {
        const int count = (n_panels - p) / pieces;
        Panel piece[kMostPanels];
        for (int j = 0; j < count; ++j) piece[j] = panel(p + j);
        if (rows.tiles == 1)
          multiply_panels<terms, 1>(rows, tail, piece, count, k, loaded);
        else
          multiply_panels<terms, 2>(rows, tail, piece, count, k, loaded);
        p += count;
      }
    }
  }
}

}  // namespace
}  // namespace hina
