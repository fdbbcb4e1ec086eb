// The first `n` values of a place, however many those are, in the words of a vocabulary that is included before it.
#pragma once

#include "kernels/simd/macros.h"

namespace hina {
namespace {
namespace simd {

// With zeros behind them; n may be negative, or more than a vector has.
HINA_INLINE Floats load_first(const float* at, int64_t n) {
  return n >= kLanes ? load(at) : n > 0 ? load(at, Tail(n)) : zero();
}
// The same, multiplied: zeros stay zeros where the weight is infinite.
HINA_INLINE Floats load_first(const float* at, int64_t n, Floats weight) {
  if (n >= kLanes) return load(at) * weight;
  return n > 0 ? keep(load(at, Tail(n)) * weight, Tail(n)) : zero();
}

template <typename T, typename Vector>
HINA_INLINE void store_first(T* at, Vector v, int64_t n) {
  if (n >= kLanes)
    store(at, v);
  else if (n > 0)
    store(at, v, Tail(n));
}

}  // namespace simd
}  // namespace
}  // namespace hina
