// tile_int8, the products. A tile of rows is 16 rows of 64 values, two units of k, and goes by two tiles of tokens, one
// for each unit, in which zeros meet the other. Up to six tiles of rows share those two. Their integer sums, of one
// unit each, are stored, and vectors add them up with their scales. Loads of rows and tokens for each product: 0.5 + 1
// / n with n tiles of rows.
//
// Tiles: 0 to 3 sums, 4 and 5 rows, 6 and 7 tokens. Rows that are fewer than 16 make tiles of fewer rows; the last pair
// of a row that ends within it is copied.
//
// Measured 2026-11-30, one thread of an Emerald Rapids VM (int8 peak of tiles 4650 GOP/s), 64 to 96 rows in the L2
// cache, k = 2048, AVX-512, GOP/s, alone on the core; qdot has 330 to 430:
//   16 tokens 560 with bytes, 375 with four bits, which are unpacked; 64 tokens 610 and 550; with zero points 500
// and about half of all these, as of qdot's, while the other thread of the core is busy.
#pragma once

#include <cstring>

#include "kernels/simd/first.h"
#include "kernels/tile/amx.h"
#include "kernels/tile_int8/layout.h"

namespace hina {
namespace {

using amx::Constant;
using simd::Floats;
using simd::kLanes;
using simd::load_first;
using simd::store_first;

// How sums of products become those of weights without their zero points.
enum class Centre {
  kNone,        // they are: signed codes around zero
  kConstant,    // unsigned codes around 128
  kGiven,       // unsigned codes, zero points are given
  kGivenSigned  // signed codes, to which 128 is added, and zero points
};

template <WeightFormat format>
HINA_INLINE Centre centre_of(const TileRows& rows) {
  const bool given = rows.zero_points != nullptr;
  if constexpr (format == WeightFormat::kUint8) return given ? Centre::kGiven : Centre::kConstant;
  if constexpr (format == WeightFormat::kInt8) return given ? Centre::kGivenSigned : Centre::kNone;
  return given ? Centre::kGiven : Centre::kNone;
}

struct RowTile {
  const char* first;
  int64_t stride;
  const float* scales;
  const float* zero_points;
  int64_t direct;                                // pairs of units that are loaded from where they lie
  alignas(64) char tail[kTileRows][kPairBytes];  // the last pair of units, if a row has not all bytes of it

  // `bytes` of the pair are there to be read.
  HINA_INLINE void copy_tail(int rows, int64_t pair, int64_t bytes) {
    std::memset(tail, 0, sizeof tail);
    for (int r = 0; r < rows; ++r)
      std::memcpy(tail[r], first + r * stride + pair * kPairBytes, static_cast<size_t>(bytes));
  }
};

// Tiles that share those of a panel. Rows of two parts go together where they are alike.
struct Group {
  RowTile tiles[kMaxRowTiles];
  int n, rows;  // tiles, and rows of each
  Centre centre;
  float* out;  // results of all rows, one after the other

  // From `row` of both parts on.
  template <WeightFormat format>
  HINA_INLINE void take(const TileRows* parts, int row, int64_t k) {
    constexpr bool kUnpacked = format == WeightFormat::kInt4 || format == WeightFormat::kMxfp4;
    const int64_t units = units_of(k), pairs = pairs_of(k);
    for (n = 0; n < kMaxRowTiles && row < parts[0].n + parts[1].n; ++n, row += rows) {
      const TileRows& part = parts[row >= parts[0].n];
      const int64_t r = row - (&part == parts ? 0 : parts[0].n), left = part.n - r;
      const int count = left < kTileRows ? static_cast<int>(left) : kTileRows;
      const Centre its_centre = centre_of<format>(part);
      if (n > 0 && (count != rows || its_centre != centre)) return;
      rows = count, centre = its_centre;
      RowTile& tile = tiles[n];
      tile.first = static_cast<const char*>(part.first) + r * part.stride, tile.stride = part.stride;
      tile.scales = part.scales + r * units;
      tile.zero_points = part.zero_points == nullptr ? nullptr : part.zero_points + r * units;
      const int64_t bytes = kUnpacked ? part.stride : k;
      tile.direct = bytes < pairs * kPairBytes ? pairs - 1 : pairs;
      if (tile.direct < pairs) tile.copy_tail(rows, tile.direct, bytes - tile.direct * kPairBytes);
    }
  }
};

// Tiles: 0 to 3 sums, 4 and 5 rows, 6 and 7 the tokens' first and second unit of a pair.
HINA_INLINE void configure(int rows, int n, amx::Config& loaded) {
  amx::Config config;
  for (int i = 0; i < 4; ++i) config.shape(i, rows, 4 * n);
  for (int i = 4; i < 6; ++i) config.shape(i, rows, kPairBytes);
  for (int i = 6; i < 8; ++i) config.shape(i, 2 * kUnitGroups, 4 * n);
  if (std::memcmp(&config, &loaded, sizeof config) == 0) return;
  loaded = config;
  amx::configure(config);
}

// A tile of rows and a pair of units.
struct Place {
  int64_t pair = 0;
  int tile = 0;

  HINA_INLINE void advance(int n) {
    if (++tile == n) tile = 0, ++pair;
  }
};

// Sums of products start with the bits of this float: as long as they are under 2^22, their bits are those of a float,
// too, that is larger by this. So vectors subtract where they would convert, which is faster: beside tiles in use, a
// core has one port for conversions, products and fma, and two for sums.
constexpr float kWhole = 0x1.8p23f;

// Tiles as they are stored.
struct alignas(64) Products {
  float of_unit[2][kTileRows][kPanelTokens];
};
struct alignas(64) Sums {
  float of_row[kTileRows][kPanelTokens];
};
constexpr int kTurns = 2;  // whose products are kept
struct Workspace {
  alignas(64) float starts[2][2][kPanelTokens];  // of the units of a pair, of this pair and the next one
  Products products[kTurns];
  Sums sums[kMaxRowTiles];
};

// Adds what `kUnits` units contribute to a tile of results. `factors` are the tokens' scales and sums, negated;
// scales and zero points of the rows are `stride` apart.
template <Centre centre, int kUnits>
HINA_INLINE void add_units(const Products& products, const Floats (&factors)[2][2], int v, const float* scales,
                           const float* zero_points, int64_t stride, int rows, Sums& sums) {
  for (int r = 0; r < rows; ++r, scales += stride, zero_points += stride) {
    Floats total = simd::load(&sums.of_row[r][v]);
    HINA_UNROLL
    for (int u = 0; u < kUnits; ++u) {
      Floats product = simd::load(&products.of_unit[u][r][v]) - simd::broadcast(kWhole);
      if constexpr (centre >= Centre::kGiven)
        product = simd::fma(simd::broadcast(zero_points[u]), factors[u][1], product);
      total = simd::fma(product, simd::broadcast(scales[u]) * factors[u][0], total);
    }
    simd::store(&sums.of_row[r][v], total);
  }
}

template <Centre centre, int kUnits>
HINA_INLINE void add(const Group& group, const Panel& panel, int64_t units, Place place, const Products& products,
                     Sums& sums) {
  const RowTile& tile = group.tiles[place.tile];
  const int64_t unit = 2 * place.pair;
  const float* zero_points = centre >= Centre::kGiven ? tile.zero_points + unit : nullptr;
  HINA_UNROLL
  for (int v = 0; v < kPanelTokens; v += kLanes) {
    Floats factors[2][2];
    HINA_UNROLL
    for (int u = 0; u < kUnits; ++u) {
      const int64_t at = (unit + u) * panel.n + v;
      factors[u][0] = load_first(panel.scales + at, panel.n - v);
      factors[u][1] = centre < Centre::kGiven ? simd::zero() : -load_first(panel.sums + at, panel.n - v);
    }
    const auto add_rows = [&](int rows) HINA_INLINE_LAMBDA {
      add_units<centre, kUnits>(products, factors, v, tile.scales + unit, zero_points, units, rows, sums);
    };
    if (group.rows == kTileRows)
      add_rows(kTileRows);
    else
      add_rows(group.rows);
  }
}

template <int tile>
HINA_INLINE void load_rows(const Group& group, Place place) {
  const RowTile& rows = group.tiles[place.tile];
  const bool direct = place.pair < rows.direct;
  amx::load<tile>(direct ? rows.first + place.pair * kPairBytes : rows.tail[0], direct ? rows.stride : kPairBytes);
}

// What sums of products of a unit start with, for each token.
template <Centre centre>
HINA_INLINE void write_start(const Panel& panel, int64_t unit, float* start) {
  constexpr float kShift = centre == Centre::kConstant ? -128.0f : centre == Centre::kGivenSigned ? 128.0f : 0.0f;
  for (int v = 0; v < kPanelTokens; v += kLanes) {
    const Floats sums = load_first(panel.sums + unit * panel.n + v, panel.n - v);
    simd::store(start + v, simd::fma(simd::broadcast(kShift), sums, simd::broadcast(kWhole)));
  }
}

template <Centre centre>
HINA_INLINE void load_tokens(const Panel& panel, int64_t pair, bool both, Workspace& workspace) {
  const char* codes = panel.codes_of(2 * pair);
  auto& starts = workspace.starts[pair % 2];
  write_start<centre>(panel, 2 * pair, starts[0]);
  if (both) write_start<centre>(panel, 2 * pair + 1, starts[1]);
  amx::load<6>(codes, panel.n * 4);
  if (both) amx::load<7>(codes + kUnit * panel.n, panel.n * 4);
}

template <Centre centre, int sums, int rows, int tokens>
HINA_INLINE void multiply_tile(const float* start) {
  amx::load<sums>(start, 0);
  if constexpr (centre == Centre::kNone || centre == Centre::kGivenSigned)
    amx::multiply_signed<sums, rows, tokens>();
  else
    amx::multiply_unsigned<sums, rows, tokens>();
}

// A tile of rows goes through stages, one turn each, so that no turn waits for what it began itself: it is loaded,
// multiplied, stored and added up.
template <Centre centre>
__attribute__((noinline)) void run(const Group& group, const Panel& panel, int64_t units, Workspace& workspace) {
  constexpr int kLag = 2;
  const int64_t turns = (units + 1) / 2 * group.n;
  const auto has_both = [&](Place place) HINA_INLINE_LAMBDA { return 2 * place.pair + 1 < units; };
  Place next, current, done;
  load_rows<4>(group, next);
  load_tokens<centre>(panel, 0, has_both(next), workspace);
  const auto turn = [&](auto parity, int64_t i) HINA_INLINE_LAMBDA {
    constexpr int kThis = parity.value, kOther = 1 - kThis;
    next.advance(group.n);
    if (i + 1 < turns) load_rows<4 + kOther>(group, next);
    if (i < turns) {
      const auto& starts = workspace.starts[current.pair % 2];
      multiply_tile<centre, 2 * kThis, 4 + kThis, 6>(starts[0]);
      if (has_both(current)) multiply_tile<centre, 2 * kThis + 1, 4 + kThis, 7>(starts[1]);
    }
    if (i + 1 < turns && next.tile == 0) load_tokens<centre>(panel, next.pair, has_both(next), workspace);
    if (i > 0 && i <= turns) {
      Products& products = workspace.products[(i - 1) % kTurns];
      amx::store<2 * kOther>(products.of_unit[0], kPanelTokens * 4);
      amx::store<2 * kOther + 1>(products.of_unit[1], kPanelTokens * 4);
    }
    current = next;
  };
  for (int64_t i = 0; i < turns + kLag; ++i) {
    if (i % 2 == 0)
      turn(Constant<0>(), i);
    else
      turn(Constant<1>(), i);
    if (i < kLag) continue;
    const Products& products = workspace.products[(i - kLag) % kTurns];
    if (has_both(done))
      add<centre, 2>(group, panel, units, done, products, workspace.sums[done.tile]);
    else
      add<centre, 1>(group, panel, units, done, products, workspace.sums[done.tile]);
    done.advance(group.n);
  }
}

template <WeightFormat format>
HINA_INLINE void multiply_group(const Group& group, const Panel& panel, int64_t units, Workspace& workspace) {
  constexpr bool kIsUint8 = format == WeightFormat::kUint8, kIsInt8 = format == WeightFormat::kInt8;
  std::memset(workspace.sums, 0, sizeof(Sums) * static_cast<size_t>(group.n));
  if (group.centre >= Centre::kGiven)
    run<kIsInt8 ? Centre::kGivenSigned : Centre::kGiven>(group, panel, units, workspace);
  else
    run<kIsUint8 ? Centre::kConstant : Centre::kNone>(group, panel, units, workspace);
  float* out = group.out;
  for (int i = 0; i < group.n; ++i)
    for (int r = 0; r < group.rows; ++r, out += panel.n)
      for (int v = 0; v < panel.n; v += kLanes)
        store_first(out + v, simd::load(&workspace.sums[i].of_row[r][v]), panel.n - v);
}

template <WeightFormat format>
void multiply(const TileRows* parts, const void* const* panels, int n_tokens, int64_t k, float* out) {
  const int n_rows = parts[0].n + parts[1].n;
  amx::Config loaded;
  Workspace workspace;
  std::memset(workspace.products, 0, sizeof workspace.products);  // not all lanes are written
  Group group;
  for (int row = 0; row < n_rows; row += group.n * group.rows) {
    group.take<format>(parts, row, k);
    for (int first = 0; first < n_tokens; first += kPanelTokens) {
      const int left = n_tokens - first;
      const Panel panel(panels[first / kPanelTokens], k, left < kPanelTokens ? left : kPanelTokens);
      configure(group.rows, panel.n, loaded);
      group.out = out + int64_t{first} * n_rows + row * panel.n;
      multiply_group<format>(group, panel, units_of(k), workspace);
    }
  }
}

}  // namespace
}  // namespace hina
