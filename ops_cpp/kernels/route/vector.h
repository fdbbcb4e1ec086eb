// route, for every vector ISA: an ISA's file includes its vocabulary, then this one, and makes the table. Value i
// belongs to column i % 16, whatever the width of a vector; sums are those of the columns first, so that all vector
// entries give the same bits.
//
// top_k: the k-th best of the maxima of the columns is a lower bound of the k-th best of all, for k columns hold a
// value that is as large. Few values reach it (with k = 8, 11 of 128 in the mean), and their ranks are counted, all
// against all, without a branch. Rows with NaN, and those with too many candidates, take insertion.
//
// Measured 2026-11-30, Emerald Rapids, nanoseconds of a token with 8 of 128 experts, portable, AVX2 and AVX-512:
// softmax 580, 133 and 72; top_k 980, 92 and 94. With 2 of 8: softmax 40, 18 and 19; top_k 22, 33 and 38.
#pragma once

#include "kernels/route/insertion.h"
#include "kernels/simd/exp.h"

namespace hina {
namespace {

using simd::broadcast;
using simd::Counts;
using simd::Floats;
using simd::kLanes;
using simd::Mask;
using simd::Tail;

constexpr int kColumns = 16;
constexpr int kCandidates = 64;
constexpr int kFewChosen = 12;  // with more, too many values reach the bound that 16 columns give
constexpr float kInfinity = __builtin_inff();

template <int columns>
constexpr int kParts = columns / kLanes;  // vectors that hold one value of each column

// step(i, part) for the vectors of [0, n), in order; step(i, part, tail) for the last if it is not whole. Lanes of a
// vector belong to part `part` of the columns.
template <int columns, typename Step>
HINA_INLINE void each_vector(int64_t n, Step step) {
  int64_t i = 0;
  for (; i + columns <= n; i += columns) {
    HINA_UNROLL
    for (int part = 0; part < kParts<columns>; ++part) step(i + part * kLanes, part);
  }
  HINA_UNROLL
  for (int part = 0; part < kParts<columns>; ++part, i += kLanes) {
    if (i + kLanes <= n)
      step(i, part);
    else if (i < n)
      step(i, part, Tail(n - i));
  }
}

// The largest number of each column; -infinity where there is none.
template <int columns>
struct Maxima {
  Floats parts[kParts<columns>];

  HINA_INLINE Maxima(const float* x, int64_t n) {
    for (Floats& part : parts) part = broadcast(-kInfinity);
    each_vector<columns>(n, [&](int64_t i, int part, auto... tail) HINA_INLINE_LAMBDA {
      parts[part] = simd::maximum(simd::load_or(x + i, broadcast(-kInfinity), tail...), parts[part]);
    });
  }
};

HINA_INLINE float largest(const Floats* vectors, int n) {
  Floats most = vectors[0];
  for (int i = 1; i < n; ++i) most = simd::maximum(most, vectors[i]);
  return simd::max_lanes(most);
}

void softmax(const float* x, float* y, int64_t n) {
  constexpr int parts = kParts<kColumns>;
  const Maxima<kColumns> maxima(x, n);
  // NaN, +infinity or nothing but -infinity in the row: the sum is NaN, for infinity - infinity is.
  const Floats best = broadcast(largest(maxima.parts, parts));
  Floats sums[parts] = {};
  each_vector<kColumns>(n, [&](int64_t i, int part, auto... tail) HINA_INLINE_LAMBDA {
    const Floats logit = simd::load(x + i, tail...) - best;
    // exp is 0 below: left out, since a product that underflows takes a hundred times as long as others.
    const Mask none = simd::greater(broadcast(-104.0f), logit);
    const Floats e = simd::choose(none, simd::zero(), simd::exp(simd::choose(none, simd::zero(), logit)));
    simd::store(y + i, e, tail...);
    sums[part] = sums[part] + simd::keep(e, tail...);
  });
  for (int part = 1; part < parts; ++part) sums[0] = sums[0] + sums[part];
  float sum;
  simd::sum_rows<1>(sums, 1, &sum);
  each_vector<kLanes>(n, [&](int64_t i, int, auto... tail) HINA_INLINE_LAMBDA {
    simd::store(y + i, simd::load(y + i, tail...) / broadcast(sum), tail...);
  });
}

void sigmoid(const float* x, float* y, int64_t n) {
  each_vector<kLanes>(n, [&](int64_t i, int, auto... tail) HINA_INLINE_LAMBDA {
    const Floats e = simd::exp(simd::zero() - simd::load(x + i, tail...));
    simd::store(y + i, broadcast(1.0f) / (broadcast(1.0f) + e), tail...);
  });
}

// At most the k-th largest of x, 0 < k <= columns.
template <int columns>
HINA_INLINE float lower_bound(const float* x, int64_t n, int k) {
  constexpr int parts = kParts<columns>;
  const Maxima<columns> maxima(x, n);
  float values[columns];
  for (int part = 0; part < parts; ++part) simd::store(values + part * kLanes, maxima.parts[part]);
  Counts below[parts] = {};  // how many other maxima are
  for (const float other : values)
    for (int part = 0; part < parts; ++part)
      below[part] = simd::count(below[part], simd::greater(maxima.parts[part], broadcast(other)));
  Floats reached[parts];  // maxima that k of them reach
  for (int part = 0; part < parts; ++part)
    reached[part] = simd::choose(simd::under(below[part], columns + 1 - k), maxima.parts[part], broadcast(-kInfinity));
  return largest(reached, parts);
}

alignas(64) constexpr float kPlaces[kCandidates] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                    16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                                    32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                                    48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

// Places of the first `n` of `values` without NaN, largest first. The buffer is longer, up to a whole vector.
HINA_INLINE void order(const float* values, int n, bool ties_to_highest, int32_t* places) {
  const Floats sign = broadcast(ties_to_highest ? -1.0f : 1.0f);
  for (int first = 0; first < n; first += kLanes) {
    const Floats mine = simd::load(values + first), my_place = simd::load(kPlaces + first) * sign;
    Counts above{};  // how many others are
    for (int other = 0; other < n; ++other) {
      const Floats its = broadcast(values[other]), its_place = broadcast(kPlaces[other]) * sign;
      const Mask wins_tie = simd::both(simd::equal(its, mine), simd::greater(my_place, its_place));
      above = simd::count(above, simd::either(simd::greater(its, mine), wins_tie));
    }
    int32_t ranks[kLanes];
    simd::store(ranks, above);
    for (int lane = 0; lane < kLanes && first + lane < n; ++lane) places[ranks[lane]] = first + lane;
  }
}

// The bits of those of 0 < n <= 64 values that are not below `bound`, NaN among them.
HINA_INLINE uint64_t reaching(const float* x, int64_t n, float bound) {
  uint64_t below = 0;
  each_vector<kLanes>(n, [&](int64_t i, int, auto... tail) HINA_INLINE_LAMBDA {
    below |= static_cast<uint64_t>(simd::bits(simd::greater(broadcast(bound), simd::load(x + i, tail...)))) << i;
  });
  return ~below & (~uint64_t{0} >> (64 - n));
}

void top_k(const float* scores, int64_t n, int64_t k, bool ties_to_highest, int32_t* ids) {
  float bound = -kInfinity;
  if (k <= kFewChosen && n > kColumns)
    bound = lower_bound<kColumns>(scores, n, static_cast<int>(k));
  else if (k > kFewChosen && k <= kCandidates && n > kCandidates)
    bound = lower_bound<kCandidates>(scores, n, static_cast<int>(k));
  float values[kCandidates];
  int32_t candidates[kCandidates], places[kCandidates];
  int found = 0;
  for (int64_t first = 0; first < n; first += 64) {
    uint64_t left = reaching(scores + first, n - first < 64 ? n - first : 64, bound);
    if (found + __builtin_popcountll(left) > kCandidates) return insert_top_k(scores, n, k, ties_to_highest, ids);
    for (; left != 0; left &= left - 1) {
      const int64_t id = first + __builtin_ctzll(left);
      if (scores[id] != scores[id]) return insert_top_k(scores, n, k, ties_to_highest, ids);  // NaN
      values[found] = scores[id];
      candidates[found++] = static_cast<int32_t>(id);
    }
  }
  order(values, found, ties_to_highest, places);
  for (int64_t i = 0; i < k; ++i) ids[i] = candidates[places[i]];
}

}  // namespace
}  // namespace hina
