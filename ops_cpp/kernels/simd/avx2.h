// The vocabulary of the vector sources (kernels/<family>/vector.h) for AVX2, FMA and F16C; avx512.h has the same one.
//
//   Floats, kLanes, kRegisters   a vector of float32, of which there are so many; + - * / round like the scalar ones
//   zero, broadcast, load, store, fma, minimum, maximum, round_to_integer, scale_by_power, pin
//   Tail                         the first `left` lanes, 0 < left < kLanes: load and store touch no other in memory,
//                                and the others are loaded as zeros, or by load_or as lanes of `others`; keep makes
//                                zeros of them. Without a Tail, all lanes are meant
//   Mask                         a truth value for each lane: greater, equal (false with NaN); both, either; bits: lane
//                                i is bit i; choose: a where it is true, else b
//   Counts                       a whole number for each lane: count adds 1 where a Mask is true; under; store
//   absolute                     |v|
//   quads                        whole numbers of four vectors as int8: those of lane i are the bytes of dword i
//   spread, choose_bytes         2 kLanes bytes in memory, or fewer, as the four-bit codes in them, one in each byte;
//   for
//                                each byte a code, one of sixteen bytes
//   kBytes<type>                 of kLanes values of a type in memory
//   widen<type>, narrow<type>    kLanes values of a type, or the first ones with a Tail, to and from float32
//   to_bfloat                    rounded to bfloat16, ties to even
//   upper_halves, upper_pairs    halves of lanes as other lanes: those of `a`, then those of `b`; or of both in turn
//   Table, nibbles, look_up      sixteen floats, chosen by four bits
//   sum_rows<n>                  the sum of the lanes of each of n accumulators
//   max_lanes                    the largest lane of a vector without NaN
//   transpose                    of kLanes vectors: lane i of v[j] and lane j of v[i] change places
//
// An instruction set has one order of addition in sum_rows, whatever n: the upper half of the lanes is added to the
// lower one until four are left, then (0 + 1) + (2 + 3).
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/simd/macros.h"
#include "kernels/types.h"

namespace hina {
// Internal linkage in every includer, see convert/scalar.h.
namespace {
namespace simd {

using Floats = __m256;
constexpr int kLanes = 8;
constexpr int kRegisters = 16;

HINA_INLINE Floats zero() { return _mm256_setzero_ps(); }
HINA_INLINE Floats broadcast(float value) { return _mm256_set1_ps(value); }
HINA_INLINE Floats load(const float* at) { return _mm256_loadu_ps(at); }
HINA_INLINE void store(float* at, Floats v) { _mm256_storeu_ps(at, v); }
HINA_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
// Keeps `v` in a register: the compiler would rather read it from memory again for each use, and loads are scarce.
template <typename Vector>
HINA_INLINE void pin(Vector& v) {
  __asm__("" : "+x"(v));
}
// When one is NaN, the second one.
HINA_INLINE Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }
HINA_INLINE Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
HINA_INLINE Floats round_to_integer(Floats v) {
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// v * 2^n for whole |n| < 250, as two factors: beyond the range of float32 it is infinity, a subnormal or zero.
HINA_INLINE Floats power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
HINA_INLINE Floats scale_by_power(Floats v, Floats n) {
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  return v * power_of_two(half) * power_of_two(_mm256_sub_epi32(whole, half));
}

struct Tail {
  int left;
  __m256i mask;

  explicit HINA_INLINE Tail(int64_t left)
      : left(static_cast<int>(left)),
        mask(_mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(left)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))) {
  }
};
HINA_INLINE Floats load(const float* at, Tail tail) { return _mm256_maskload_ps(at, tail.mask); }
HINA_INLINE void store(float* at, Floats v, Tail tail) { _mm256_maskstore_ps(at, tail.mask, v); }
HINA_INLINE Floats keep(Floats v) { return v; }
HINA_INLINE Floats keep(Floats v, Tail tail) { return _mm256_and_ps(v, _mm256_castsi256_ps(tail.mask)); }
HINA_INLINE Floats load_or(const float* at, Floats) { return load(at); }
HINA_INLINE Floats load_or(const float* at, Floats others, Tail tail) {
  return _mm256_blendv_ps(others, load(at, tail), _mm256_castsi256_ps(tail.mask));
}

using Mask = __m256;
HINA_INLINE Mask greater(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
HINA_INLINE Mask equal(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
HINA_INLINE Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
HINA_INLINE Mask either(Mask a, Mask b) { return _mm256_or_ps(a, b); }
HINA_INLINE uint32_t bits(Mask mask) { return static_cast<uint32_t>(_mm256_movemask_ps(mask)); }
HINA_INLINE Floats choose(Mask mask, Floats a, Floats b) { return _mm256_blendv_ps(b, a, mask); }

using Counts = __m256i;
HINA_INLINE Counts count(Counts n, Mask mask) { return _mm256_sub_epi32(n, _mm256_castps_si256(mask)); }
HINA_INLINE Mask under(Counts n, int limit) {
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(limit), n));
}
HINA_INLINE void store(int32_t* at, Counts n) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), n); }

template <DataType type>
constexpr int kBytes = type == DataType::kFloat32 ? 4 * kLanes
                       : type == DataType::kUint4 ? kLanes / 2
                       : type < DataType::kUint8  ? 2 * kLanes
                                                  : kLanes;

// Four-bit codes, one in the low half of each lane; what lies above it is not cleared.
HINA_INLINE __m256i nibbles(const void* at) {
  int32_t eight;
  std::memcpy(&eight, at, 4);
  return _mm256_srlv_epi32(_mm256_set1_epi32(eight), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
}
HINA_INLINE __m256i nibbles(const void* at, Tail tail) {
  alignas(4) char part[4] = {};
  std::memcpy(part, at, static_cast<size_t>(tail.left + 1) / 2);
  return nibbles(part);
}

template <DataType type>
HINA_INLINE Floats widen(const void* at) {
  if constexpr (type == DataType::kFloat32) {
    return load(static_cast<const float*>(at));
  } else if constexpr (type == DataType::kFloat16) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(at)));
  } else if constexpr (type == DataType::kBFloat16) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  } else if constexpr (type == DataType::kUint4) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(nibbles(at), _mm256_set1_epi32(15)));
  } else {
    const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(at));
    if constexpr (type == DataType::kInt8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    const __m256i codes = _mm256_cvtepu8_epi32(bytes);
    if constexpr (type == DataType::kUint8) return _mm256_cvtepi32_ps(codes);
    // E8M0 is the exponent of float32, but for 0 (2^-127, subnormal) and 255 (NaN), which want one bit of the fraction.
    const __m256i is_end = _mm256_or_si256(_mm256_cmpeq_epi32(codes, _mm256_setzero_si256()),
                                           _mm256_cmpeq_epi32(codes, _mm256_set1_epi32(255)));
    const __m256i fraction = _mm256_and_si256(is_end, _mm256_set1_epi32(0x400000));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(codes, 23), fraction));
  }
}

template <DataType type>
HINA_INLINE Floats widen(const void* at, Tail tail) {
  if constexpr (type == DataType::kFloat32) return load(static_cast<const float*>(at), tail);
  alignas(16) char part[16] = {};
  std::memcpy(part, at, static_cast<size_t>((tail.left * kBytes<type> + kLanes - 1) / kLanes));
  return widen<type>(part);
}

// Rounded to bfloat16, in the upper half of each lane; the lower half is not cleared.
HINA_INLINE __m256i bfloat_bits(Floats value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, is_nan);
}
HINA_INLINE Floats to_bfloat(Floats value) {
  return _mm256_castsi256_ps(_mm256_and_si256(bfloat_bits(value), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

template <DataType type>
HINA_INLINE void narrow(Floats value, void* at) {
  if constexpr (type == DataType::kFloat32) {
    store(static_cast<float*>(at), value);
  } else if constexpr (type == DataType::kFloat16) {
    _mm_storeu_si128(static_cast<__m128i*>(at), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  } else {
    const __m256i upper = _mm256_srli_epi32(bfloat_bits(value), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(at), _mm256_castsi256_si128(packed));
  }
}

template <DataType type>
HINA_INLINE void narrow(Floats value, void* at, Tail tail) {
  if constexpr (type == DataType::kFloat32) return store(static_cast<float*>(at), value, tail);
  alignas(16) char part[16];
  narrow<type>(value, part);
  std::memcpy(at, part, static_cast<size_t>(tail.left) * 2);
}

HINA_INLINE Floats upper_halves(Floats a, Floats b) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(a), 16);
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(b), 16);
  return _mm256_castsi256_ps(_mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
}
HINA_INLINE Floats upper_pairs(Floats even, Floats odd) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(even), 16);
  return _mm256_castsi256_ps(_mm256_blend_epi16(low, _mm256_castps_si256(odd), 0xaa));
}

struct Table {
  Floats low, high;

  explicit HINA_INLINE Table(const float* values) : low(load(values)), high(load(values + 8)) {}
  HINA_INLINE Table(Floats low, Floats high) : low(low), high(high) {}
  HINA_INLINE Table operator-(Floats v) const { return {low - v, high - v}; }
  HINA_INLINE Table operator*(Floats v) const { return {low * v, high * v}; }
};
HINA_INLINE Floats look_up(const Table& table, __m256i codes) {
  const Floats low = _mm256_permutevar8x32_ps(table.low, codes), high = _mm256_permutevar8x32_ps(table.high, codes);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}

HINA_INLINE __m128 fold(Floats v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }

// out[i] = sum of the lanes of acc[i * stride], n is 1 or a multiple of 4.
template <int n>
HINA_INLINE void sum_rows(const Floats* acc, int64_t stride, float* out) {
  if constexpr (n == 1) {
    const __m128 pairs = _mm_hadd_ps(fold(*acc), _mm_setzero_ps());
    _mm_store_ss(out, _mm_hadd_ps(pairs, pairs));
  } else {
    HINA_UNROLL
    for (int i = 0; i < n; i += 4) {
      const __m128 ab = _mm_hadd_ps(fold(acc[i * stride]), fold(acc[(i + 1) * stride]));
      const __m128 cd = _mm_hadd_ps(fold(acc[(i + 2) * stride]), fold(acc[(i + 3) * stride]));
      _mm_storeu_ps(out + i, _mm_hadd_ps(ab, cd));
    }
  }
}

HINA_INLINE void transpose(Floats* v) {
  const auto swap_pairs = [](Floats a, Floats b, bool high) HINA_INLINE_LAMBDA {
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_castpd_ps(high ? _mm256_unpackhi_pd(x, y) : _mm256_unpacklo_pd(x, y));
  };
  Floats quads[8];  // [4 i + c]: of rows 4 i to 4 i + 3, the columns c and c + 4
  HINA_UNROLL
  for (int i = 0; i < 8; i += 4) {
    const Floats low = _mm256_unpacklo_ps(v[i], v[i + 1]), low2 = _mm256_unpacklo_ps(v[i + 2], v[i + 3]);
    const Floats high = _mm256_unpackhi_ps(v[i], v[i + 1]), high2 = _mm256_unpackhi_ps(v[i + 2], v[i + 3]);
    quads[i] = swap_pairs(low, low2, false), quads[i + 1] = swap_pairs(low, low2, true);
    quads[i + 2] = swap_pairs(high, high2, false), quads[i + 3] = swap_pairs(high, high2, true);
  }
  HINA_UNROLL
  for (int c = 0; c < 4; ++c) {
    v[c] = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x20);
    v[4 + c] = _mm256_permute2f128_ps(quads[c], quads[4 + c], 0x31);
  }
}

HINA_INLINE float max_lanes(Floats v) {
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

HINA_INLINE Floats absolute(Floats v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
HINA_INLINE void store(int32_t* at, Counts n, Tail tail) { _mm256_maskstore_epi32(at, tail.mask, n); }

HINA_INLINE Counts quads(Floats a, Floats b, Floats c, Floats d) {
  const __m256i ab = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
  const __m256i cd = _mm256_packs_epi32(_mm256_cvtps_epi32(c), _mm256_cvtps_epi32(d));
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm256_shuffle_epi8(_mm256_packs_epi16(ab, cd), _mm256_broadcastsi128_si256(order));
}

HINA_INLINE __m256i spread(const void* at) {
  const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(at)));
  return _mm256_and_si256(_mm256_or_si256(words, _mm256_slli_epi16(words, 4)), _mm256_set1_epi8(15));
}
HINA_INLINE __m256i spread(const void* at, int64_t bytes) {
  alignas(16) char part[16] = {};
  std::memcpy(part, at, static_cast<size_t>(bytes));
  return spread(part);
}
HINA_INLINE __m256i choose_bytes(const int8_t* table, __m256i codes) {
  const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(sixteen), codes);
}
HINA_INLINE void store(char* at, __m256i bytes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), bytes); }

}  // namespace simd
}  // namespace
}  // namespace hina
