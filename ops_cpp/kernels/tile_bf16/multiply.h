// tile_bf16, the products in AMX tiles, which know nothing of vectors.
//
// One tile of rows meets up to five panels: five tiles of sums, one of rows, and two of tokens, as the last panel may
// be narrower. No more tiles of sums are needed: a product that adds to the sums of the one before it does not wait for
// them (16 cycles each). So every weight is loaded once for 80 tokens, and the rows are sixteen streams, as many as the
// prefetchers follow; two to six tiles of rows side by side would load fewer tiles of tokens, but read memory more
// slowly. Rows of a tile are spread over the part, for each stream to have pages of its own, which the next tile goes
// on with.
//
// Measured 2026-11-30, Emerald Rapids VM, one thread, 96 rows, while AMX ran at its full rate (2640 GFLOP/s; neighbours
// on the host take three quarters of it for minutes), k = 768 / 2048:
//   rows from memory, GB/s of rows (a plain read loop: 17 to 19)
//     up to 16 tokens 18 / 19, with two terms 16 / 18; six tiles of rows at a time: 14 / 12
//     32 tokens 16 / 16, 64 tokens 12 / 13, 128 tokens 7.3 / 8.1; 2 x 2 tiles at a time: 12 / 17, 10 / 12, 6.4 / 7.7
//   rows in L2, GFLOP/s (the limit are 48 bytes a cycle from L2)
//     16 tokens 850 / 800, 32 tokens 990 / 1070, 64 tokens 1190 / 1290 (49 % of the peak); 2 x 2: 1230 / 1350
#pragma once

#include <cstring>

#include "kernels/tile/amx.h"
#include "kernels/tile/tile.h"
#include "kernels/tile_bf16/layout.h"

namespace hina {
namespace {

constexpr int kMostPanels = 5;  // at a time
constexpr int kRowTile = kMostPanels, kTokenTile = kRowTile + 1, kLastTokenTile = kTokenTile + 1;

using amx::Constant;

// f(Constant<0>), f(Constant<1>) .. : tiles are named by constants.
template <int n, int i = 0, typename F>
HINA_INLINE void unroll(F f) {
  if constexpr (i < n) {
    f(Constant<i>());
    unroll<n, i + 1>(f);
  }
}

// Rows at, at + step .. among those of both parts, the first `stride` bytes before the second.
struct RowTile {
  const char* first;
  int64_t stride;
  int n;
  int64_t at, step;
};

// Tile i of the rows of a part. The rows that are left when there are sixteen or more come with some before them, which
// then have the same results twice.
HINA_INLINE RowTile row_tile(const TileRows& part, int64_t at, int i) {
  const char* first = static_cast<const char*>(part.first);
  const int whole = part.n / kTileRows;
  if (i < whole) return {first + i * part.stride, whole * part.stride, kTileRows, at + i, whole};
  const int n = whole == 0 ? part.n : kTileRows;
  return {first + (part.n - n) * part.stride, part.stride, n, at + part.n - n, 1};
}

// The last values of each row, when they do not fill a step, and zeros behind them.
struct alignas(64) Tail {
  char bytes[kTileRows][64];

  HINA_INLINE void copy(const RowTile& rows, int64_t k) {
    const int64_t whole = k / kStep * kStep;
    std::memset(bytes, 0, sizeof bytes);
    for (int r = 0; r < rows.n; ++r)
      std::memcpy(bytes[r], rows.first + r * rows.stride + whole * 2, static_cast<size_t>(k - whole) * 2);
  }
};

struct Panel {
  const char* first;
  float* out;
  int64_t n;
};

// All panels but the last have as many tokens.
template <int kPanels>
HINA_INLINE void configure(int n_rows, const Panel* panels, amx::Config& loaded) {
  const auto bytes = [&](int p) HINA_INLINE_LAMBDA { return static_cast<int>(panels[p].n * 4); };
  amx::Config config;
  for (int p = 0; p < kPanels; ++p) config.shape(p, n_rows, bytes(p));
  config.shape(kRowTile, n_rows, 64);
  config.shape(kTokenTile, kStepGroups, bytes(0));
  config.shape(kLastTokenTile, kStepGroups, bytes(kPanels - 1));
  if (std::memcmp(&config, &loaded, sizeof config) == 0) return;
  loaded = config;
  amx::configure(config);
}

template <int kPanels, int terms>
__attribute__((noinline)) void multiply_tile(const RowTile& rows, const Tail& tail, const Panel* panels, int64_t k) {
  const char* token[kPanels];
  int64_t token_stride[kPanels];
  unroll<kPanels>([&](auto p) HINA_INLINE_LAMBDA {
    amx::zero<p.value>();
    token[p.value] = panels[p.value].first;
    token_stride[p.value] = panels[p.value].n * 4;
  });
  const auto step = [&](const char* row, int64_t stride) HINA_INLINE_LAMBDA {
    amx::load<kRowTile>(row, stride);
    unroll<terms>([&](auto) HINA_INLINE_LAMBDA {
      unroll<kPanels>([&](auto p) HINA_INLINE_LAMBDA {
        constexpr int kTile = p.value == kPanels - 1 ? kLastTokenTile : kTokenTile;
        amx::load<kTile>(token[p.value], token_stride[p.value]);
        amx::multiply_bf16<p.value, kRowTile, kTile>();
        token[p.value] += kStepGroups * token_stride[p.value];
      });
    });
  };
  for (int64_t i = 0; i < k / kStep; ++i) step(rows.first + i * kStep * 2, rows.stride);
  if (k % kStep != 0) step(tail.bytes[0], 64);
  unroll<kPanels>([&](auto p) HINA_INLINE_LAMBDA {
    amx::store<p.value>(panels[p.value].out + rows.at * panels[p.value].n, rows.step * panels[p.value].n * 4);
  });
}

template <int terms, int kPanels = 1>
HINA_INLINE void multiply_panels(const RowTile& rows, const Tail& tail, const Panel* panels, int n_panels, int64_t k,
                                 amx::Config& loaded) {
  if (n_panels == kPanels) {
    configure<kPanels>(rows.n, panels, loaded);
    multiply_tile<kPanels, terms>(rows, tail, panels, k);
  } else if constexpr (kPanels < kMostPanels) {
    multiply_panels<terms, kPanels + 1>(rows, tail, panels, n_panels, k, loaded);
  }
}

template <int terms>
void multiply(const TileRows* parts, const void* const* panels, int n_tokens, int64_t k, float* out) {
  const int n_panels = (n_tokens + kPanelTokens - 1) / kPanelTokens;
  const int64_t n_rows = parts[0].n + parts[1].n;
  const auto panel = [&](int p) HINA_INLINE_LAMBDA -> Panel {
    const int first = p * kPanelTokens, left = n_tokens - first;
    return {static_cast<const char*>(panels[p]), out + first * n_rows, left < kPanelTokens ? left : kPanelTokens};
  };
  amx::Config loaded;
  Tail tail;
  for (int part = 0; part < 2; ++part) {
    for (int i = 0; i * kTileRows < parts[part].n; ++i) {
      const RowTile rows = row_tile(parts[part], part * parts[0].n, i);
      if (k % kStep != 0) tail.copy(rows, k);
      // Pieces of about the same size.
      for (int p = 0, pieces = (n_panels + kMostPanels - 1) / kMostPanels; pieces > 0; --pieces) {
        const int count = (n_panels - p) / pieces;
        Panel piece[kMostPanels];
        for (int j = 0; j < count; ++j) piece[j] = panel(p + j);
        multiply_panels<terms>(rows, tail, piece, count, k, loaded);
        p += count;
      }
    }
  }
}

}  // namespace
}  // namespace hina
