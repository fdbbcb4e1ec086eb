// activation, AVX2 + FMA: the two that need an exponential. exp(x) = 2^n * p(r), r = x - n ln 2 in two parts, p of
// degree 6 (Taylor on |r| <= ln 2 / 2, relative error below 2^-23); 2^n is applied as two factors so that results
// beyond the float range become infinity, zero or a subnormal instead of wrapping. The last, partial step goes through
// buffers on the stack, so that each value is computed by the same instructions wherever it stands.
#include <immintrin.h>

#include <cstring>

#include "kernels/tables.h"

namespace hina {
namespace {

constexpr int kLanes = 8;

inline __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

inline __m256 exp8(__m256 x) {
  // min and max return their second operand when one is NaN, so NaN goes through.
  x = _mm256_max_ps(_mm256_set1_ps(-104.0f), _mm256_min_ps(_mm256_set1_ps(104.0f), x));
  const __m256 n =
      _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
  __m256 p = _mm256_set1_ps(1.0f / 720.0f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  return _mm256_mul_ps(_mm256_mul_ps(p, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}

template <Activation activation>
inline __m256 act(__m256 g, __m256 alpha) {
  const __m256 one = _mm256_set1_ps(1.0f);
  if constexpr (activation == Activation::kSilu) {
    const __m256 e = exp8(_mm256_mul_ps(_mm256_sub_ps(_mm256_setzero_ps(), alpha), g));
    return _mm256_div_ps(g, _mm256_add_ps(one, e));
  } else {
    // gelu_tanh: 0.5 g (1 + tanh(z)) = g / (1 + exp(-2 z)), z = sqrt(2 / pi) (g + 0.044715 g^3)
    const __m256 square = _mm256_mul_ps(g, g);
    const __m256 inner = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_set1_ps(0.044715f), square), g, g);
    const __m256 e = exp8(_mm256_mul_ps(_mm256_set1_ps(-2.0f * 0.79788456f), inner));
    return _mm256_div_ps(g, _mm256_add_ps(one, e));
  }
}

template <Activation activation>
inline __m256 step(const ActivationParams& params, __m256 g, const float* up) {
  if (up == nullptr) return act<activation>(g, _mm256_set1_ps(params.alpha));
  const __m256 limit = _mm256_set1_ps(params.limit);
  const __m256 lower = _mm256_sub_ps(_mm256_setzero_ps(), limit);
  const __m256 u = _mm256_max_ps(lower, _mm256_min_ps(limit, _mm256_loadu_ps(up)));
  const __m256 a = act<activation>(_mm256_min_ps(limit, g), _mm256_set1_ps(params.alpha));
  return _mm256_mul_ps(a, _mm256_add_ps(u, _mm256_set1_ps(params.beta)));
}

template <Activation activation>
void apply(const ActivationParams& params, const float* gate, const float* up, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const float* u = up == nullptr ? nullptr : up + i;
    _mm256_storeu_ps(out + i, step<activation>(params, _mm256_loadu_ps(gate + i), u));
  }
  if (i < n) {
    const size_t bytes = static_cast<size_t>(n - i) * sizeof(float);
    alignas(32) float g[kLanes] = {};
    alignas(32) float u[kLanes] = {};
    std::memcpy(g, gate + i, bytes);
    if (up != nullptr) std::memcpy(u, up + i, bytes);
    _mm256_store_ps(g, step<activation>(params, _mm256_load_ps(g), up == nullptr ? nullptr : u));
    std::memcpy(out + i, g, bytes);
  }
}

}  // namespace

const ActivationKernel kActivationAvx2[kActivationAvx2Count] = {
    {"silu_avx2", Isa::kAvx2, Activation::kSilu, apply<Activation::kSilu>},
    {"gelu_tanh_avx2", Isa::kAvx2, Activation::kGeluTanh, apply<Activation::kGeluTanh>},
};

}  // namespace hina
