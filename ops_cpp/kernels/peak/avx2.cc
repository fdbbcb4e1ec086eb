// peak, AVX2 + FMA. Twelve FMA chains cover latency 4 at two a cycle with registers to spare; the int8 loops are the
// two ways to sum products of bytes: one `maddubs` per `madd`, and two whose 16-bit sums are added first (4-bit
// weights).
#include <immintrin.h>

#include "kernels/peak/opaque.h"
#include "kernels/peak/peak.h"

namespace hina {
namespace {

constexpr int kChains = 12, kIntChains = 8;

double float32(int64_t steps) {
  __m256 a = _mm256_set1_ps(2), b = _mm256_set1_ps(3), acc[kChains];
  HINA_OPAQUE(a);
  HINA_OPAQUE(b);
  HINA_UNROLL
  for (int i = 0; i < kChains; ++i) {
    acc[i] = _mm256_setzero_ps();
    HINA_OPAQUE(acc[i]);
  }
  do {
    HINA_UNROLL
    for (int i = 0; i < kChains; ++i) {
      acc[i] = _mm256_fmadd_ps(a, b, acc[i]);
      HINA_OPAQUE(acc[i]);
    }
  } while (--steps > 0);
  HINA_UNROLL
  for (int i = 1; i < kChains; ++i) acc[0] = _mm256_add_ps(acc[0], acc[i]);
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, acc[0]);
  double sum = 0;
  for (const float lane : lanes) sum += static_cast<double>(lane);
  return sum;
}

template <int kMaddubs>
double int8(int64_t steps) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i a = _mm256_set1_epi8(2), b = _mm256_set1_epi8(3), acc[kIntChains];
  HINA_OPAQUE(b);
  HINA_UNROLL
  for (int i = 0; i < kIntChains; ++i) {
    acc[i] = _mm256_setzero_si256();
    HINA_OPAQUE(acc[i]);
  }
  do {
    HINA_UNROLL
    for (int i = 0; i < kIntChains; ++i) {
      HINA_OPAQUE(a);
      __m256i sums = _mm256_maddubs_epi16(a, b);
      HINA_UNROLL
      for (int j = 1; j < kMaddubs; ++j) {
        HINA_OPAQUE(a);
        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(a, b));
      }
      acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(sums, ones));
      HINA_OPAQUE(acc[i]);
    }
  } while (--steps > 0);
  HINA_UNROLL
  for (int i = 1; i < kIntChains; ++i) acc[0] = _mm256_add_epi32(acc[0], acc[i]);
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), acc[0]);
  double sum = 0;
  for (const int32_t lane : lanes) sum += lane;
  return sum;
}

}  // namespace

const PeakKernel kPeakAvx2[3] = {
    {"peak_float32_avx2", Isa::kAvx2, PeakType::kFloat32, kChains * 8, float32},
    {"peak_int8_avx2", Isa::kAvx2, PeakType::kInt8, kIntChains * 32, int8<1>},
    {"peak_int8_avx2_pairs", Isa::kAvx2, PeakType::kInt8, kIntChains * 64, int8<2>},
};

}  // namespace hina
