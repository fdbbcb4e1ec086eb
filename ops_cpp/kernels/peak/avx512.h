// What the AVX-512 loops have in common: chains of one instruction that multiplies and adds, and the two ways to sum
// products of bytes without VNNI.
#include <immintrin.h>

#include "kernels/peak/opaque.h"
#include "kernels/peak/peak.h"

#define HINA_INLINE inline __attribute__((always_inline))

namespace hina {
namespace {

constexpr int kChains = 24;

HINA_INLINE __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
HINA_INLINE __m512i add(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
HINA_INLINE void store(float* to, __m512 v) { _mm512_store_ps(to, v); }
HINA_INLINE void store(int32_t* to, __m512i v) { _mm512_store_si512(to, v); }

template <typename Lane, int n, typename Sums>
HINA_INLINE double sum_of(Sums (&acc)[n]) {
  HINA_UNROLL
  for (int i = 1; i < n; ++i) acc[0] = add(acc[0], acc[i]);
  alignas(64) Lane lanes[16];
  store(lanes, acc[0]);
  double sum = 0;
  for (const Lane lane : lanes) sum += static_cast<double>(lane);
  return sum;
}

// acc[i] = f(a, b, acc[i]) for all chains in each step.
template <typename Lane, typename Factors, typename Sums, typename F>
HINA_INLINE double chains(int64_t steps, Factors a, Factors b, Sums zero, F f) {
  Sums acc[kChains];
  HINA_OPAQUE_512(a);
  HINA_OPAQUE_512(b);
  HINA_UNROLL
  for (int i = 0; i < kChains; ++i) {
    acc[i] = zero;
    HINA_OPAQUE_512(acc[i]);
  }
  do {
    HINA_UNROLL
    for (int i = 0; i < kChains; ++i) {
      acc[i] = f(a, b, acc[i]);
      HINA_OPAQUE_512(acc[i]);
    }
  } while (--steps > 0);
  return sum_of<Lane>(acc);
}

}  // namespace
}  // namespace hina
