// Where the values of a panel lie. Along k there are steps of 32 values, 16 groups of two; a step has the 16 x n groups
// of the tokens' first terms, then those of their second ones. Beyond k there are zeros. So with one term, one token
// and k % 32 == 0 the panel is the token, as bfloat16.
#pragma once

#include <cstdint>

namespace hina {
// Internal linkage in every includer, see convert/scalar.h.
namespace {

constexpr int64_t kStep = 32;  // values of k that a tile of rows, and one of tokens, has
constexpr int kStepGroups = 16;

inline int64_t steps_of(int64_t k) { return (k + kStep - 1) / kStep; }

template <int terms>
int64_t panel_bytes(int64_t k, int n) {
  return steps_of(k) * kStep * 2 * terms * n;
}

}  // namespace
}  // namespace hina
