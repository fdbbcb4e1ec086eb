// peak, BF16: vdpbf16ps adds two products of bfloat16 numbers to a float32 sum.
#include "kernels/peak/avx512.h"

namespace hina {
namespace {

double bfloat16(int64_t steps) {
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(2), _mm512_set1_ps(2));
  const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(3), _mm512_set1_ps(3));
  return chains<float>(steps, a, b, _mm512_setzero_ps(),
                       [](__m512bh x, __m512bh y, __m512 acc) { return _mm512_dpbf16_ps(acc, x, y); });
}

}  // namespace

const PeakKernel kPeakAvx512Bf16[1] = {
    {"peak_bfloat16_avx512_bf16", Isa::kAvx512Bf16, PeakType::kBFloat16, kChains * 32, bfloat16},
};

}  // namespace hina
