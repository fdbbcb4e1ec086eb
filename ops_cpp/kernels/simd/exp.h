// The exponential, in the words of a vocabulary that is included before it.
//
// exp(x) = 2^n * p(r), r = x - n ln 2 in two parts, |r| <= ln 2 / 2. p = 1 + r + r^2 q(r), of degree 6, is fitted to
// the least relative error, 2^-28, so that roundings are what is left: at most 0.9 units in the last place, found by
// trying every float32 that has a normal result. The clamp keeps n in range and lets results beyond that of float32
// become infinity or zero. NaN stays NaN.
#pragma once

#include "kernels/simd/macros.h"

namespace hina {
namespace {
namespace simd {

HINA_INLINE Floats exp(Floats x) {
  x = maximum(broadcast(-104.0f), minimum(broadcast(104.0f), x));  // NaN goes through
  const Floats n = round_to_integer(x * broadcast(1.44269504f));
  Floats r = fma(n, broadcast(-0.693145752f), x);
  r = fma(n, broadcast(-1.42860677e-6f), r);
  Floats p = broadcast(0x1.6a23d0p-10f);
  p = fma(p, r, broadcast(0x1.123a20p-7f));
  p = fma(p, r, broadcast(0x1.5558f2p-5f));
  p = fma(p, r, broadcast(0x1.555492p-3f));
  p = fma(p, r, broadcast(0x1.fffffcp-2f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  return scale_by_power(p, n);
}

}  // namespace simd
}  // namespace
}  // namespace hina
