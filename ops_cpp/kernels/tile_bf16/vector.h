// tile_bf16, for every vector ISA: an ISA's file includes its vocabulary (kernels/simd), then this one, and makes the
// table. Only packing has vectors; the products are in multiply.h. Squares of kLanes groups x kLanes tokens are
// transposed. Measured 2026-11-30, Emerald Rapids, AVX-512: 16 tokens 4.7 billion values per second, with two
// terms 2.2.
#pragma once

#include "kernels/simd/first.h"
#include "kernels/tile_bf16/layout.h"
#include "kernels/tile_bf16/multiply.h"

namespace hina {
namespace {

using simd::Floats;
using simd::kLanes;
using simd::load_first;
using simd::store_first;

// Where group g of token 0 has one of its terms.
template <int terms>
HINA_INLINE float* place(void* panel, int64_t g, int term, int n) {
  return static_cast<float*>(panel) + ((g / kStepGroups * terms + term) * kStepGroups + g % kStepGroups) * n;
}

// Returns `value` in bfloat16 and leaves what is missing, which is nothing of infinity.
HINA_INLINE Floats take_term(Floats& value) {
  const Floats rounded = simd::to_bfloat(value), infinity = simd::broadcast(__builtin_inff());
  const simd::Mask finite =
      simd::both(simd::greater(infinity, rounded), simd::greater(rounded, simd::zero() - infinity));
  value = simd::choose(finite, value - rounded, simd::zero());
  return rounded;
}

// One token: its `count` values from `from` on, and the padding where they are the last.
template <int terms>
HINA_INLINE void pack_one(const float* values, float weight, int64_t count, int64_t from, int64_t k, void* panel) {
  const int64_t end = from + count == k ? steps_of(k) * kStep : from + count;
  for (int64_t i = from; i < end; i += kLanes) {
    Floats value = load_first(values + (i - from), from + count - i, simd::broadcast(weight));
    HINA_UNROLL
    for (int term = 0; term < terms; ++term)
      simd::narrow<DataType::kBFloat16>(take_term(value), place<terms>(panel, i / 2, term, 1));
  }
}

// Groups g .. g + kLanes - 1 of tokens t .. t + kLanes - 1, as far as there are so many.
template <int terms>
HINA_INLINE void pack_square(const float* const* tokens, const float* weights, int t, int n, int64_t g, int64_t k,
                             void* panel) {
  Floats squares[terms][kLanes];
  HINA_UNROLL
  for (int j = 0; j < kLanes; ++j) {
    Floats low = simd::zero(), high = simd::zero();
    if (t + j < n) {
      const Floats weight = simd::broadcast(weights == nullptr ? 1.0f : weights[t + j]);
      low = load_first(tokens[t + j] + g * 2, k - g * 2, weight);
      high = load_first(tokens[t + j] + g * 2 + kLanes, k - g * 2 - kLanes, weight);
    }
    HINA_UNROLL
    for (int term = 0; term < terms; ++term) {
      const Floats rounded = take_term(low);
      squares[term][j] = simd::upper_halves(rounded, take_term(high));
    }
  }
  HINA_UNROLL
  for (int term = 0; term < terms; ++term) {
    simd::transpose(squares[term]);
    float* to = place<terms>(panel, g, term, n) + t;
    HINA_UNROLL
    for (int i = 0; i < kLanes; ++i) store_first(to + i * n, squares[term][i], n - t);
  }
}

template <int terms>
void pack(const float* const* tokens, const float* weights, int n, int64_t k, void* panel) {
  if (n == 1) return pack_one<terms>(tokens[0], weights == nullptr ? 1.0f : weights[0], k, 0, k, panel);
  for (int64_t g = 0; g < steps_of(k) * kStepGroups; g += kLanes)
    for (int t = 0; t < n; t += kLanes) pack_square<terms>(tokens, weights, t, n, g, k, panel);
}

template <int terms>
void pack_rows(const float* values, int count, int n, int64_t from, int64_t k, void* panel) {
  if (n == 1) return pack_one<terms>(values, 1.0f, count, from, k, panel);
  const int64_t end = from + count == k ? steps_of(k) * kStep : from + count;
  for (int64_t i = from; i < end; i += 2) {
    const float* row = values + (i - from) * n;
    const int64_t rows = from + count - i;
    for (int t = 0; t < n; t += kLanes) {
      Floats even = rows > 0 ? load_first(row + t, n - t) : simd::zero();
      Floats odd = rows > 1 ? load_first(row + n + t, n - t) : simd::zero();
      HINA_UNROLL
      for (int term = 0; term < terms; ++term) {
        const Floats rounded = take_term(even);
        store_first(place<terms>(panel, i / 2, term, n) + t, simd::upper_pairs(rounded, take_term(odd)), n - t);
      }
    }
  }
}

// From how many tokens on: always, so that a token's bits do not depend on its batch. Dot products are bound by memory,
// too, for one or two tokens: 17 GB/s of rows, with three 16.5, four 14, eight 9 (measured as in multiply.h). One term
// reads 18 to 19 GB/s, two 16 to 18.
constexpr int kFromTokens = 1;

template <int terms>
constexpr TileKernel entry(const char* name, Isa isa) {
  return {name,
          isa,
          WeightFormat::kFloat,
          terms,
          kFromTokens,
          panel_bytes<terms>,
          pack<terms>,
          pack_rows<terms>,
          nullptr,
          multiply<terms>};
}

}  // namespace
}  // namespace hina
