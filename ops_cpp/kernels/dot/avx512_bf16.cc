// dot, AVX-512 BF16: rows and tokens of bfloat16, in the tiles of vector.h. VDPBF16PS adds the two products of a pair
// to each float32 lane. Products are exact, each addition is rounded to nearest; subnormal inputs, products and sums
// are taken for zero, whatever MXCSR says. A k that does not fill a step is loaded under a mask.
//
// Emerald Rapids issues one in two cycles, half the multiply-adds of float32 FMA (measured 2026-11-29: 80 and 160
// GFLOP/s, of which this reaches 93 % with 32 tokens): there it spares conversion and cache, but is not faster than
// rows and tokens widened to float32. CPUs that issue one in each cycle gain a factor of two.
#include "kernels/simd/avx512.h"
// The vocabulary comes first.
#include "kernels/dot/vector.h"
#include "kernels/tables.h"

namespace hina {
namespace {

// How a tile multiplies, see Widened: 32 elements of k are 16 pairs.
struct Pairs {
  struct Tail {
    __mmask32 mask;
    explicit HINA_INLINE Tail(int64_t left) : mask((__mmask32{1} << left) - 1) {}
  };
  using Row = __m512i;
  using Token = __m512i;
  static constexpr int kStep = 32;
  static constexpr int kRowSize = 2;
  static constexpr int kTokenSize = 2;

  static HINA_INLINE __m512i row(const char* at) { return _mm512_loadu_si512(at); }
  static HINA_INLINE __m512i row(const char* at, Tail tail) { return _mm512_maskz_loadu_epi16(tail.mask, at); }
  template <typename... Last>
  static HINA_INLINE __m512i token(const char* at, Last... last) {
    return row(at, last...);
  }
  static HINA_INLINE Floats multiply_add(__m512i row, __m512i token, Floats acc) {
    return _mm512_dpbf16_ps(acc, (__m512bh)row, (__m512bh)token);
  }
};

}  // namespace

const DotKernel kDotAvx512Bf16[1] = {
    {"dot_bf16_avx512_bf16", Isa::kAvx512Bf16, DataType::kBFloat16, DataType::kBFloat16, dot<Pairs>},
};

}  // namespace hina
