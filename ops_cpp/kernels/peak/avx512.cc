// peak, AVX-512 without VNNI: the loops of avx2.cc, twice as wide.
#include "kernels/peak/avx512.h"

namespace hina {
namespace {

constexpr int kIntChains = 16;

double float32(int64_t steps) {
  return chains<float>(steps, _mm512_set1_ps(2), _mm512_set1_ps(3), _mm512_setzero_ps(),
                       [](__m512 a, __m512 b, __m512 acc) { return _mm512_fmadd_ps(a, b, acc); });
}

template <int kMaddubs>
double int8(int64_t steps) {
  const __m512i ones = _mm512_set1_epi16(1);
  __m512i a = _mm512_set1_epi8(2), b = _mm512_set1_epi8(3), acc[kIntChains];
  HINA_OPAQUE_512(b);
  HINA_UNROLL
  for (int i = 0; i < kIntChains; ++i) {
    acc[i] = _mm512_setzero_si512();
    HINA_OPAQUE_512(acc[i]);
  }
  do {
    HINA_UNROLL
    for (int i = 0; i < kIntChains; ++i) {
      HINA_OPAQUE_512(a);
      __m512i sums = _mm512_maddubs_epi16(a, b);
      HINA_UNROLL
      for (int j = 1; j < kMaddubs; ++j) {
        HINA_OPAQUE_512(a);
        sums = _mm512_add_epi16(sums, _mm512_maddubs_epi16(a, b));
      }
      acc[i] = _mm512_add_epi32(acc[i], _mm512_madd_epi16(sums, ones));
      HINA_OPAQUE_512(acc[i]);
    }
  } while (--steps > 0);
  return sum_of<int32_t>(acc);
}

}  // namespace

const PeakKernel kPeakAvx512[3] = {
    {"peak_float32_avx512", Isa::kAvx512, PeakType::kFloat32, kChains * 16, float32},
    {"peak_int8_avx512", Isa::kAvx512, PeakType::kInt8, kIntChains * 64, int8<1>},
    {"peak_int8_avx512_pairs", Isa::kAvx512, PeakType::kInt8, kIntChains * 128, int8<2>},
};

}  // namespace hina
