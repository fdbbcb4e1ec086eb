// The choice of the k best, one by one: for portable code, and for rows that vector code leaves.
#pragma once

#include "kernels/route/route.h"

namespace hina {
// Internal linkage in every includer, see convert/scalar.h.
namespace {

[[maybe_unused]] inline bool ranks_above(float a, float b) { return a != a ? b == b : a > b; }  // NaN above all numbers

// By insertion into a sorted list: k is small. Scanning in the direction of the winning ids and inserting only what is
// strictly greater settles the ties.
[[maybe_unused]] inline void insert_top_k(const float* scores, int64_t n, int64_t k, bool ties_to_highest,
                                          int32_t* ids) {
  int64_t filled = 0;
  for (int64_t step = 0; step < n; ++step) {
    const int64_t id = ties_to_highest ? n - 1 - step : step;
    const float score = scores[id];
    if (filled == k && !ranks_above(score, scores[ids[k - 1]])) continue;
    int64_t at = filled < k ? filled++ : k - 1;
    for (; at > 0 && ranks_above(score, scores[ids[at - 1]]); --at) ids[at] = ids[at - 1];
    ids[at] = static_cast<int32_t>(id);
  }
}

}  // namespace
}  // namespace hina
