// The vocabulary of avx2.h for AVX-512 F, BW, VL and DQ.
#pragma once

// GCC 12 takes the undefined operand of its own intrinsics for a mistake (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstring>

#include "kernels/simd/macros.h"
#include "kernels/types.h"

namespace hina {
// Internal linkage in every includer, see convert/scalar.h.
namespace {
namespace simd {

using Floats = __m512;
constexpr int kLanes = 16;
constexpr int kRegisters = 32;

HINA_INLINE Floats zero() { return _mm512_setzero_ps(); }
HINA_INLINE Floats broadcast(float value) { return _mm512_set1_ps(value); }
HINA_INLINE Floats load(const float* at) { return _mm512_loadu_ps(at); }
HINA_INLINE void store(float* at, Floats v) { _mm512_storeu_ps(at, v); }
HINA_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
template <typename Vector>
HINA_INLINE void pin(Vector& v) {
  __asm__("" : "+v"(v));
}
HINA_INLINE Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
HINA_INLINE Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
HINA_INLINE Floats round_to_integer(Floats v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
HINA_INLINE Floats scale_by_power(Floats v, Floats n) { return _mm512_scalef_ps(v, n); }

struct Tail {
  int left;
  __mmask16 mask;

  explicit HINA_INLINE Tail(int64_t left)
      : left(static_cast<int>(left)), mask(static_cast<__mmask16>((1u << left) - 1)) {}
};
HINA_INLINE Floats load(const float* at, Tail tail) { return _mm512_maskz_loadu_ps(tail.mask, at); }
HINA_INLINE void store(float* at, Floats v, Tail tail) { _mm512_mask_storeu_ps(at, tail.mask, v); }
HINA_INLINE Floats keep(Floats v) { return v; }
HINA_INLINE Floats keep(Floats v, Tail tail) { return _mm512_maskz_mov_ps(tail.mask, v); }
HINA_INLINE Floats load_or(const float* at, Floats) { return load(at); }
HINA_INLINE Floats load_or(const float* at, Floats others, Tail tail) {
  return _mm512_mask_loadu_ps(others, tail.mask, at);
}

using Mask = __mmask16;
HINA_INLINE Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
HINA_INLINE Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
HINA_INLINE Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
HINA_INLINE Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
HINA_INLINE uint32_t bits(Mask mask) { return mask; }
HINA_INLINE Floats choose(Mask mask, Floats a, Floats b) { return _mm512_mask_blend_ps(mask, b, a); }

using Counts = __m512i;
HINA_INLINE Counts count(Counts n, Mask mask) { return _mm512_mask_add_epi32(n, mask, n, _mm512_set1_epi32(1)); }
HINA_INLINE Mask under(Counts n, int limit) { return _mm512_cmplt_epi32_mask(n, _mm512_set1_epi32(limit)); }
HINA_INLINE void store(int32_t* at, Counts n) { _mm512_storeu_si512(at, n); }

template <DataType type>
constexpr int kBytes = type == DataType::kFloat32 ? 4 * kLanes
                       : type == DataType::kUint4 ? kLanes / 2
                       : type < DataType::kUint8  ? 2 * kLanes
                                                  : kLanes;

// Four-bit codes, one in the low half of each lane; what lies above it is not cleared.
HINA_INLINE __m512i nibbles(__m128i eight_bytes) {
  const __m512i dwords = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                                                  _mm512_castsi128_si512(eight_bytes));
  return _mm512_srlv_epi32(dwords, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
}
HINA_INLINE __m512i nibbles(const void* at) { return nibbles(_mm_loadl_epi64(static_cast<const __m128i*>(at))); }
HINA_INLINE __m512i nibbles(const void* at, Tail tail) {
  return nibbles(_mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << (tail.left + 1) / 2) - 1), at));
}

template <DataType type>
HINA_INLINE Floats of_words(__m256i words) {
  if constexpr (type == DataType::kFloat16) return _mm512_cvtph_ps(words);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

template <DataType type>
HINA_INLINE Floats of_bytes(__m128i bytes) {
  if constexpr (type == DataType::kInt8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  const __m512i codes = _mm512_cvtepu8_epi32(bytes);
  if constexpr (type == DataType::kUint8) return _mm512_cvtepi32_ps(codes);
  // E8M0 is the exponent of float32, but for 0 (2^-127, subnormal) and 255 (NaN), which want one bit of the fraction.
  const __mmask16 is_end =
      _mm512_cmpeq_epi32_mask(codes, _mm512_setzero_si512()) | _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(255));
  const __m512i exponent = _mm512_slli_epi32(codes, 23);
  return _mm512_castsi512_ps(_mm512_mask_or_epi32(exponent, is_end, exponent, _mm512_set1_epi32(0x400000)));
}

template <DataType type>
HINA_INLINE Floats widen(const void* at) {
  if constexpr (type == DataType::kFloat32)
    return load(static_cast<const float*>(at));
  else if constexpr (type == DataType::kFloat16 || type == DataType::kBFloat16)
    return of_words<type>(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
  else if constexpr (type == DataType::kUint4)
    return _mm512_cvtepi32_ps(_mm512_and_si512(nibbles(at), _mm512_set1_epi32(15)));
  else
    return of_bytes<type>(_mm_loadu_si128(static_cast<const __m128i*>(at)));
}

template <DataType type>
HINA_INLINE Floats widen(const void* at, Tail tail) {
  if constexpr (type == DataType::kFloat32)
    return load(static_cast<const float*>(at), tail);
  else if constexpr (type == DataType::kFloat16 || type == DataType::kBFloat16)
    return of_words<type>(_mm256_maskz_loadu_epi16(tail.mask, at));
  else if constexpr (type == DataType::kUint4)
    return _mm512_cvtepi32_ps(_mm512_and_si512(nibbles(at, tail), _mm512_set1_epi32(15)));
  else
    return of_bytes<type>(_mm_maskz_loadu_epi8(tail.mask, at));
}

// Rounded to bfloat16, in the upper half of each lane; the lower half is not cleared.
HINA_INLINE __m512i bfloat_bits(Floats value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
}
HINA_INLINE Floats to_bfloat(Floats value) {
  return _mm512_castsi512_ps(_mm512_and_si512(bfloat_bits(value), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

template <DataType type>
HINA_INLINE __m256i words_of(Floats value) {
  if constexpr (type == DataType::kFloat16) return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bfloat_bits(value), 16));
}

template <DataType type>
HINA_INLINE void narrow(Floats value, void* at) {
  if constexpr (type == DataType::kFloat32)
    store(static_cast<float*>(at), value);
  else
    _mm256_storeu_si256(static_cast<__m256i*>(at), words_of<type>(value));
}

template <DataType type>
HINA_INLINE void narrow(Floats value, void* at, Tail tail) {
  if constexpr (type == DataType::kFloat32)
    store(static_cast<float*>(at), value, tail);
  else
    _mm256_mask_storeu_epi16(at, tail.mask, words_of<type>(value));
}

HINA_INLINE Floats upper_halves(Floats a, Floats b) {
  const __m256i low = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a), 16));
  const __m256i high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(b), 16));
  return _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
HINA_INLINE Floats upper_pairs(Floats even, Floats odd) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
  return _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_castps_si512(odd)));
}

struct Table {
  Floats values;

  explicit HINA_INLINE Table(const float* values) : values(load(values)) {}
  explicit HINA_INLINE Table(Floats values) : values(values) {}
  HINA_INLINE Table operator-(Floats v) const { return Table(values - v); }
  HINA_INLINE Table operator*(Floats v) const { return Table(values * v); }
};
HINA_INLINE Floats look_up(const Table& table, __m512i codes) { return _mm512_permutexvar_ps(codes, table.values); }

// The halves of a and of b folded: lanes of a in the lower half, of b in the upper one.
HINA_INLINE Floats fold_halves(Floats a, Floats b) {
  return _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
}
HINA_INLINE Floats fold_quarters(Floats ab, Floats cd) {
  return _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd);
}
// Four accumulators, each with its last four lanes in one quarter of the result.
HINA_INLINE Floats fold_four(const Floats* acc, int64_t stride) {
  return fold_quarters(fold_halves(acc[0], acc[stride]), fold_halves(acc[2 * stride], acc[3 * stride]));
}
// (0 + 1) + (2 + 3) of each quarter, of `a` in its even and of `b` in its odd pair of lanes.
HINA_INLINE Floats sum_quarters(Floats a, Floats b) {
  const Floats pairs = _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd);
  return pairs + _mm512_permute_ps(pairs, 0xb1);
}

// out[i] = sum of the lanes of acc[i * stride], n is 1, 4 or 8.
template <int n>
HINA_INLINE void sum_rows(const Floats* acc, int64_t stride, float* out) {
  if constexpr (n == 8) {
    const Floats sums = sum_quarters(fold_four(acc, stride), fold_four(acc + 4 * stride, stride));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums)));
  } else if constexpr (n == 4) {
    const Floats folded = fold_four(acc, stride);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(order, sum_quarters(folded, folded))));
  } else {
    const Floats folded = fold_quarters(fold_halves(*acc, *acc), zero());
    _mm_store_ss(out, _mm512_castps512_ps128(sum_quarters(folded, folded)));
  }
}

HINA_INLINE void transpose(Floats* v) {
  const auto swap_pairs = [](Floats a, Floats b, bool high) HINA_INLINE_LAMBDA {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
  };
  Floats quads[16];  // [4 i + c]: of rows 4 i to 4 i + 3, the columns c, c + 4, c + 8 and c + 12
  HINA_UNROLL
  for (int i = 0; i < 16; i += 4) {
    const Floats low = _mm512_unpacklo_ps(v[i], v[i + 1]), low2 = _mm512_unpacklo_ps(v[i + 2], v[i + 3]);
    const Floats high = _mm512_unpackhi_ps(v[i], v[i + 1]), high2 = _mm512_unpackhi_ps(v[i + 2], v[i + 3]);
    quads[i] = swap_pairs(low, low2, false), quads[i + 1] = swap_pairs(low, low2, true);
    quads[i + 2] = swap_pairs(high, high2, false), quads[i + 3] = swap_pairs(high, high2, true);
  }
  HINA_UNROLL
  for (int c = 0; c < 4; ++c) {
    const Floats even = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0x88);
    const Floats odd = _mm512_shuffle_f32x4(quads[c], quads[4 + c], 0xdd);
    const Floats even2 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0x88);
    const Floats odd2 = _mm512_shuffle_f32x4(quads[8 + c], quads[12 + c], 0xdd);
    v[c] = _mm512_shuffle_f32x4(even, even2, 0x88), v[4 + c] = _mm512_shuffle_f32x4(odd, odd2, 0x88);
    v[8 + c] = _mm512_shuffle_f32x4(even, even2, 0xdd), v[12 + c] = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
  }
}

HINA_INLINE float max_lanes(Floats v) { return _mm512_reduce_max_ps(v); }

HINA_INLINE Floats absolute(Floats v) { return _mm512_abs_ps(v); }
HINA_INLINE void store(int32_t* at, Counts n, Tail tail) { _mm512_mask_storeu_epi32(at, tail.mask, n); }

HINA_INLINE Counts quads(Floats a, Floats b, Floats c, Floats d) {
  const __m512i ab = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
  const __m512i cd = _mm512_packs_epi32(_mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d));
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_shuffle_epi8(_mm512_packs_epi16(ab, cd), _mm512_broadcast_i32x4(order));
}

HINA_INLINE __m512i spread(__m256i bytes) {
  const __m512i words = _mm512_cvtepu8_epi16(bytes);
  return _mm512_and_si512(_mm512_or_si512(words, _mm512_slli_epi16(words, 4)), _mm512_set1_epi8(15));
}
HINA_INLINE __m512i spread(const void* at) { return spread(_mm256_loadu_si256(static_cast<const __m256i*>(at))); }
HINA_INLINE __m512i spread(const void* at, int64_t bytes) {
  return spread(_mm256_maskz_loadu_epi8(static_cast<__mmask32>((uint64_t{1} << bytes) - 1), at));
}
HINA_INLINE __m512i choose_bytes(const int8_t* table, __m512i codes) {
  const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen), codes);
}
HINA_INLINE void store(char* at, __m512i bytes) { _mm512_storeu_si512(at, bytes); }

}  // namespace simd
}  // namespace
}  // namespace hina
