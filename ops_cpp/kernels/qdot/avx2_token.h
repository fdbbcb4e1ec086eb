// The tokens of qdot's AVX2 kernels: their layout, and quantise.
#pragma once

#include "kernels/qdot/avx2_rows.h"

namespace hina {
namespace {

// Scales [units], sums [units], plane of even k, plane of odd k. Units are padded to a multiple of kPad with codes 0,
// sum 0 and scale -0.0: with weights' scales of 0.0, they add -0.0 to an accumulator, which changes none.
template <Format format, int unit>
struct Token {
  float* scales;
  float* sums;
  char* planes[2];

  Token() = default;
  HINA_INLINE Token(const void* token, int64_t units) {
    const int64_t padded = round_up(units, kPad);
    scales = static_cast<float*>(const_cast<void*>(token));
    sums = scales + padded;
    planes[0] = reinterpret_cast<char*>(sums + padded);
    planes[1] = planes[0] + padded * kPlane<format, unit>;
  }
  static int64_t bytes(int64_t units) { return round_up(round_up(units, kPad) * (8 + 2 * kPlane<format, unit>), 64); }
};

template <int control>
HINA_INLINE __m256i shuffle(__m256i a, __m256i b) {
  return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), control));
}

template <Format format, int unit>
HINA_INLINE void quantise_unit(const float* x, int64_t units, int64_t u, void* token) {
  __m256i v[4] = {};
  __m256i largest = _mm256_setzero_si256();  // the bits of |x|, which are in the order of the values, NaN on top
  HINA_UNROLL
  for (int i = 0; i < unit / 8; ++i) {
    v[i] = load(x + 8 * i);
    largest = _mm256_max_epi32(largest, _mm256_and_si256(v[i], _mm256_set1_epi32(0x7fffffff)));
  }
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  const int bits = _mm_cvtsi128_si32(half);
  const float amax = _mm_cvtss_f32(_mm_castsi128_ps(half));
  const bool finite = bits < 0x7f800000, used = finite && amax >= 0x1p-100f;

  const __m256 inverse = _mm256_set1_ps(used ? 127.0f / amax : 0.0f);
  const __m256i keep = _mm256_set1_epi32(used ? -1 : 0);
  __m256i sum = _mm256_setzero_si256();
  HINA_UNROLL
  for (int i = 0; i < unit / 8; ++i) {
    const __m256 value = _mm256_castsi256_ps(_mm256_and_si256(v[i], keep));
    v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(value, inverse));
    sum = _mm256_add_epi32(sum, v[i]);
  }
  half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));

  const Token<format, unit> to(token, units);
  to.scales[u] = !finite ? __builtin_nanf("") : used ? amax / 127.0f : 0.0f;
  to.sums[u] = static_cast<float>(_mm_cvtsi128_si32(half));
  char* even_plane = to.planes[0] + u * kPlane<format, unit>;
  char* odd_plane = to.planes[1] + u * kPlane<format, unit>;
  // In int16, as they come: 0 2 8 10 16 18 24 26 | 4 6 12 14 20 22 28 30, and the next ones.
  const __m256i even = _mm256_packs_epi32(shuffle<0x88>(v[0], v[1]), shuffle<0x88>(v[2], v[3]));
  const __m256i odd = _mm256_packs_epi32(shuffle<0xdd>(v[0], v[1]), shuffle<0xdd>(v[2], v[3]));
  if constexpr (kNibbles<format>) {
    const __m256i bytes = _mm256_packs_epi16(even, odd);
    const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
    const __m128i e = _mm_unpacklo_epi16(low, high), o = _mm_unpackhi_epi16(low, high);
    std::memcpy(even_plane, &e, kPlane<format, unit>);
    std::memcpy(odd_plane, &o, kPlane<format, unit>);
  } else {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i e = _mm256_permutevar8x32_epi32(even, order), o = _mm256_permutevar8x32_epi32(odd, order);
    std::memcpy(even_plane, &e, kPlane<format, unit>);
    std::memcpy(odd_plane, &o, kPlane<format, unit>);
  }
}

template <Format format, int unit>
void quantise_of(const float* x, int64_t n, int64_t units, int64_t u, void* token) {
  for (; n >= unit; n -= unit, x += unit) quantise_unit<format, unit>(x, units, u++, token);
  if (n > 0) {
    float padded[unit] = {};
    std::memcpy(padded, x, static_cast<size_t>(n) * 4);
    quantise_unit<format, unit>(padded, units, u++, token);
  }
  if (u < units) return;
  const float zeros[unit] = {};
  for (; u % kPad != 0; ++u) {
    quantise_unit<format, unit>(zeros, units, u, token);
    Token<format, unit>(token, units).scales[u] = -0.0f;
  }
}

}  // namespace
}  // namespace hina
