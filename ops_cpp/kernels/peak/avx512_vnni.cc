// peak, VNNI: vpdpbusd adds four products of bytes to a 32-bit sum.
#include "kernels/peak/avx512.h"

namespace hina {
namespace {

double int8(int64_t steps) {
  return chains<int32_t>(steps, _mm512_set1_epi8(2), _mm512_set1_epi8(3), _mm512_setzero_si512(),
                         [](__m512i a, __m512i b, __m512i acc) { return _mm512_dpbusd_epi32(acc, a, b); });
}

}  // namespace

const PeakKernel kPeakAvx512Vnni[1] = {
    {"peak_int8_avx512_vnni", Isa::kAvx512Vnni, PeakType::kInt8, kChains * 64, int8},
};

}  // namespace hina
