// scatter, for every vector ISA: an ISA's file includes its vocabulary, then this one, and makes the table. Squares of
// kLanes rows and tokens are transposed, so that a token's sums are read and written as vectors.
#pragma once

#include "kernels/scatter/scatter.h"

namespace hina {
namespace {

using simd::Floats;
using simd::kLanes;
using simd::Tail;

// sum + weight * value, each rounded: the empty instruction keeps a compiler from making one fma of them.
HINA_INLINE Floats add_product(Floats sum, Floats weight, Floats value) {
  Floats product = weight * value;
  simd::pin(product);
  return sum + product;
}

// `rows` rows, at most kLanes, of the tokens [first, first + count), at most kLanes.
template <typename... Columns>
HINA_INLINE void square(const float* values, int rows, int n, int first, int count, const float* weights,
                        float* const* sums, int row, Columns... columns) {
  Floats v[kLanes];
  HINA_UNROLL
  for (int r = 0; r < kLanes; ++r) v[r] = r < rows ? simd::load(values + r * n + first, columns...) : simd::zero();
  simd::transpose(v);
  HINA_UNROLL
  for (int t = 0; t < kLanes; ++t) {
    if (t >= count) break;
    const Floats weight = simd::broadcast(weights[first + t]);
    float* sum = sums[first + t] + row;
    if (rows == kLanes)
      simd::store(sum, add_product(simd::load(sum), weight, v[t]));
    else
      simd::store(sum, add_product(simd::load(sum, Tail(rows)), weight, v[t]), Tail(rows));
  }
}

void scatter(const float* values, int rows, int n, const float* weights, float* const* sums) {
  for (int row = 0; row < rows; row += kLanes) {
    const int count = rows - row < kLanes ? rows - row : kLanes;
    const float* from = values + row * n;
    int t = 0;
    for (; t + kLanes <= n; t += kLanes) square(from, count, n, t, kLanes, weights, sums, row);
    if (t < n) square(from, count, n, t, n - t, weights, sums, row, Tail(n - t));
  }
}

}  // namespace
}  // namespace hina
