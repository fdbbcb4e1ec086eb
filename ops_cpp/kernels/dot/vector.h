// dot, for every vector ISA: an ISA's file includes its vocabulary (kernels/simd), then this one, and makes the table.
//
// A tile is kTileRows x 3 accumulators, with three tokens and one row in registers beside them (AVX2: 4 x 3, 7 loads
// for 12 FMAs; AVX-512: 8 x 3, 11 loads for 24 FMAs); x 2 and x 1 for the last tokens, and 4 x .. and 1 x .. for the
// last rows. One token takes 8 rows: enough chains to cover the latency of an FMA, and eight streams of rows. A result
// has ONE accumulator, a vector stepped through k and added up in one fixed order, whatever the tile: that is what
// makes it independent of the batch. Lanes beyond k are loaded as exact zeros.
//
// Measured with kernels_bench, 2026-11-29, one thread of an Emerald Rapids VM (AVX2 FMA 80 GFLOP/s, AVX-512 160, 15 to
// 18 GB/s from memory), k = 768 / 2048:
//   32 tokens, rows in L2: of the FMA peak, float32 91 / 94 % on AVX2 and 83 / 85 % on AVX-512,
//                          16-bit rows 84 / 88 % and 75 / 76 %
//   1 token, rows from memory: mostly 90 to 99 % of what a plain loop reads, but 76 to 82 % in single runs at k = 768
#pragma once

#include "kernels/dot/dot.h"
#include "kernels/simd/macros.h"

namespace hina {
namespace {

using simd::Floats;

constexpr int kTileRows = simd::kRegisters / 4;
// Tokens that a group of rows is multiplied with at a time: 16-bit rows are converted for each such bunch.
constexpr int kBunch = 48;
// From this number of tokens on, 16-bit rows are converted to float32 once for a bunch, and not in each tile.
constexpr int kWidenFrom = 7;
// Elements of k in a block: the rows of a tile stay in the L1 cache for all tokens of a bunch (8 rows of float32: 24
// KiB). With few tokens the rows come from memory as fast as they are used up; there, short blocks let the prefetchers
// fetch a part of the next one while this one is multiplied (5 % at 16 tokens), and cost 10 % where nothing is fetched.
constexpr int64_t kBlock = 768;
constexpr int64_t kShortBlock = 256;
constexpr int kFewTokens = 16;

// Rows of `type` with tokens of float32. `kStep` elements of k are multiplied at once; the last step has a Tail.
template <DataType type>
struct Widened {
  using Row = Floats;
  using Token = Floats;
  using Tail = simd::Tail;
  static constexpr DataType kType = type;
  static constexpr int kStep = simd::kLanes;
  static constexpr int kRowSize = type == DataType::kFloat32 ? 4 : 2;
  static constexpr int kTokenSize = 4;

  template <typename... Last>
  static HINA_INLINE Row row(const char* at, Last... last) {
    return simd::widen<type>(at, last...);
  }
  template <typename... Last>
  static HINA_INLINE Token token(const char* at, Last... last) {
    return simd::widen<DataType::kFloat32>(at, last...);
  }
  static HINA_INLINE Floats multiply_add(Row row, Token token, Floats acc) { return simd::fma(row, token, acc); }
};

// A tile through one block of k: `n` elements, from where `rows` and `tokens` point. Between blocks the accumulators
// are parked; the last block leaves sums[t * kRows + r].
template <typename Product, int kRows, int kTokens>
__attribute__((noinline)) void tile(const char* const* rows, const char* const* tokens, int64_t n, bool first,
                                    bool last, Floats* parked, float* sums) {
  Floats acc[kRows][kTokens];
  HINA_UNROLL
  for (int i = 0; i < kRows * kTokens; ++i) acc[i / kTokens][i % kTokens] = simd::zero();
  if (!first) {
    HINA_UNROLL
    for (int i = 0; i < kRows * kTokens; ++i) acc[i / kTokens][i % kTokens] = parked[i];
  }
  const auto step = [&](int64_t i, auto... tail) HINA_INLINE_LAMBDA {
    typename Product::Token token[kTokens];
    HINA_UNROLL
    for (int t = 0; t < kTokens; ++t) token[t] = Product::token(tokens[t] + i * Product::kTokenSize, tail...);
    HINA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      typename Product::Row row = Product::row(rows[r] + i * Product::kRowSize, tail...);
      if constexpr (kTokens > 1) simd::pin(row);
      HINA_UNROLL
      for (int t = 0; t < kTokens; ++t) acc[r][t] = Product::multiply_add(row, token[t], acc[r][t]);
    }
  };
  int64_t i = 0;
  for (; i + Product::kStep <= n; i += Product::kStep) step(i);
  if (i < n) step(i, typename Product::Tail(n - i));
  if (last) {
    HINA_UNROLL
    for (int t = 0; t < kTokens; ++t) simd::sum_rows<kRows>(&acc[0][t], kTokens, sums + t * kRows);
  } else {
    HINA_UNROLL
    for (int j = 0; j < kRows * kTokens; ++j) parked[j] = acc[j / kTokens][j % kTokens];
  }
}

// The same for all tokens of a bunch.
template <typename Product, int kRows>
HINA_INLINE void tiles(const char* const* rows, const char* const* tokens, int n_tokens, int64_t n, bool first,
                       bool last, Floats* parked, float* sums) {
  int t = 0;
  for (; t + 3 <= n_tokens; t += 3)
    tile<Product, kRows, 3>(rows, tokens + t, n, first, last, parked + t * kRows, sums + t * kRows);
  if (n_tokens - t == 2)
    tile<Product, kRows, 2>(rows, tokens + t, n, first, last, parked + t * kRows, sums + t * kRows);
  if (n_tokens - t == 1)
    tile<Product, kRows, 1>(rows, tokens + t, n, first, last, parked + t * kRows, sums + t * kRows);
}

template <DataType type, int kRows>
HINA_INLINE void widen_rows(const char* const* rows, int64_t n, float (*wide)[kBlock]) {
  const auto step = [&](int64_t i, auto... tail) HINA_INLINE_LAMBDA {
    HINA_UNROLL
    for (int r = 0; r < kRows; ++r)
      simd::store(wide[r] + i, simd::widen<type>(rows[r] + i * Widened<type>::kRowSize, tail...), tail...);
  };
  int64_t i = 0;
  for (; i + simd::kLanes <= n; i += simd::kLanes) step(i);
  if (i < n) step(i, simd::Tail(n - i));
}

// kRows rows, `stride` apart in `rows`, with up to kBunch tokens; results are `stride` apart likewise.
template <typename Product, int kRows>
__attribute__((noinline)) void bunch(const void* const* rows, int stride, const void* const* tokens, int n_tokens,
                                     int64_t k, float* out, int64_t out_stride) {
  Floats parked[kBunch * kRows];
  float sums[kBunch * kRows];
  const int64_t block = n_tokens > 3 && n_tokens <= kFewTokens ? kShortBlock : kBlock;
  for (int64_t from = 0; from < k; from += block) {
    const int64_t n = k - from < block ? k - from : block;
    const bool first = from == 0, last = from + n == k;
    const char* w[kRows];
    const char* x[kBunch];
    for (int r = 0; r < kRows; ++r) w[r] = static_cast<const char*>(rows[r * stride]) + from * Product::kRowSize;
    for (int t = 0; t < n_tokens; ++t) x[t] = static_cast<const char*>(tokens[t]) + from * Product::kTokenSize;
    if constexpr (Product::kRowSize < Product::kTokenSize) {
      if (n_tokens >= kWidenFrom) {
        alignas(64) float wide[kRows][kBlock];
        widen_rows<Product::kType, kRows>(w, n, wide);
        for (int r = 0; r < kRows; ++r) w[r] = reinterpret_cast<const char*>(wide[r]);
        tiles<Widened<DataType::kFloat32>, kRows>(w, x, n_tokens, n, first, last, parked, sums);
        continue;
      }
    }
    tiles<Product, kRows>(w, x, n_tokens, n, first, last, parked, sums);
  }
  for (int t = 0; t < n_tokens; ++t)
    for (int r = 0; r < kRows; ++r) out[t * out_stride + r * stride] = sums[t * kRows + r];
}

// As many groups of kRows rows as there are; returns the number of rows. The rows of a group are not neighbours: short
// rows would lie in one page, where the prefetchers follow one stream only. Spread out, each is a stream of its own,
// which the next group continues (k = 768 of bfloat16, one token, from memory: 15 GB/s for 8 GB/s).
template <typename Product, int kRows>
HINA_INLINE int groups(const void* const* rows, int n_rows, const void* const* tokens, int n_tokens, int64_t k,
                       float* out, int64_t out_stride) {
  const int n = n_rows / kRows;
  for (int g = 0; g < n; ++g)
    for (int t = 0; t < n_tokens; t += kBunch)
      bunch<Product, kRows>(rows + g, n, tokens + t, n_tokens - t < kBunch ? n_tokens - t : kBunch, k,
                            out + t * out_stride + g, out_stride);
  return n * kRows;
}

template <typename Product>
HINA_INLINE int groups_of_one_token(const void* const* rows, int n_rows, const void* token, int64_t k, float* out) {
  constexpr int kRows = 8;
  const int n = n_rows / kRows;
  const char* x = static_cast<const char*>(token);
  for (int g = 0; g < n; ++g) {
    const char* w[kRows];
    float sums[kRows];
    for (int r = 0; r < kRows; ++r) w[r] = static_cast<const char*>(rows[g + r * n]);
    tile<Product, kRows, 1>(w, &x, k, true, true, nullptr, sums);
    for (int r = 0; r < kRows; ++r) out[g + r * n] = sums[r];
  }
  return n * kRows;
}

template <typename Product>
void dot(const void* const* rows, int n_rows, const void* const* tokens, int n_tokens, int64_t k, float* out,
         int64_t out_stride) {
  int r = 0;
  if (n_tokens == 1)
    r = groups_of_one_token<Product>(rows, n_rows, tokens[0], k, out);
  else
    r = groups<Product, kTileRows>(rows, n_rows, tokens, n_tokens, k, out, out_stride);
  r += groups<Product, 4>(rows + r, n_rows - r, tokens, n_tokens, k, out + r, out_stride);
  groups<Product, 1>(rows + r, n_rows - r, tokens, n_tokens, k, out + r, out_stride);
}

}  // namespace
}  // namespace hina
