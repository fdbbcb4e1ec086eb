// The rows of qdot's AVX2 kernels: how codes are split and multiplied, eight rows at a time.
//
// Four-bit codes are multiplied as bytes (maddubs, summed in int16), eight-bit codes as int16 (madd, summed in int32).
// Splitting a vector of row bytes gives the values of even and of odd k: low and high nibbles, or even and odd bytes
// widened. So the codes of a token lie in two planes, even k and odd k, as bytes or as int16, and a unit is `kPlane`
// bytes of a row and of either plane.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/qdot/qdot.h"
#include "kernels/simd/macros.h"

namespace hina {
// Internal linkage, see convert/scalar.h.
namespace {

using Format = WeightFormat;

constexpr int kPad = 4;  // units that are transposed at a time: tokens and panels are padded to them

template <Format format>
constexpr bool kNibbles = format == Format::kInt4 || format == Format::kMxfp4;

template <Format format, int unit>
constexpr int kPlane = kNibbles<format> ? unit / 2 : unit;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t units_of(int64_t k, int unit) { return (k + unit - 1) / unit; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

HINA_INLINE __m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
HINA_INLINE __m128i load_half(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
HINA_INLINE void store(void* at, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(at), v); }

HINA_INLINE __m256i value_codes(__m256i nibbles) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(HINA_MXFP4_CODES));
  return _mm256_shuffle_epi8(table, nibbles);
}

// The codes of even k and of odd k in 32 bytes of a row.
template <Format format>
HINA_INLINE void split(__m256i row, __m256i& even, __m256i& odd) {
  if constexpr (kNibbles<format>) {
    const __m256i low = _mm256_set1_epi8(15);
    even = _mm256_and_si256(row, low);
    odd = _mm256_and_si256(_mm256_srli_epi16(row, 4), low);
    if constexpr (format == Format::kMxfp4) even = value_codes(even), odd = value_codes(odd);
  } else {
    if constexpr (format == Format::kInt8) row = _mm256_xor_si256(row, _mm256_set1_epi8(-128));
    even = _mm256_and_si256(row, _mm256_set1_epi16(255));
    odd = _mm256_srli_epi16(row, 8);
  }
}

// Sums of products of codes and a token's: int16 lanes of nibbles, int32 lanes else.
template <Format format>
HINA_INLINE __m256i multiply(__m256i codes, __m256i x) {
  return kNibbles<format> ? _mm256_maddubs_epi16(codes, x) : _mm256_madd_epi16(codes, x);
}

template <Format format>
HINA_INLINE __m256i add(__m256i a, __m256i b) {
  return kNibbles<format> ? _mm256_add_epi16(a, b) : _mm256_add_epi32(a, b);
}

template <Format format>
HINA_INLINE __m256i to_int32(__m256i sums) {
  return kNibbles<format> ? _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) : sums;
}

// Dword i of eight rows in the lanes of out[i].
HINA_INLINE void transpose(const char* const* rows, int64_t offset, __m256i* out) {
  __m256i v[4];
  HINA_UNROLL
  for (int r = 0; r < 4; ++r)
    v[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(load_half(rows[r] + offset)), load_half(rows[r + 4] + offset),
                                   1);
  const __m256i ab = _mm256_unpacklo_epi32(v[0], v[1]), cd = _mm256_unpacklo_epi32(v[2], v[3]);
  const __m256i ef = _mm256_unpackhi_epi32(v[0], v[1]), gh = _mm256_unpackhi_epi32(v[2], v[3]);
  out[0] = _mm256_unpacklo_epi64(ab, cd);
  out[1] = _mm256_unpackhi_epi64(ab, cd);
  out[2] = _mm256_unpacklo_epi64(ef, gh);
  out[3] = _mm256_unpackhi_epi64(ef, gh);
}

// Rows r, r + step, r + 2 step .. of a block, eight of them; where there are fewer, the last one again.
struct Rows8 {
  const char* codes[8];
  const char* scales[8];
  const char* zero_points[8];
  bool same_zero_points;

  Rows8() = default;
  Rows8(const QRows& rows, int r, int step) {
    same_zero_points = true;
    for (int i = 0; i < 8; ++i, r += step) {
      const int row = r < rows.n ? r : rows.n - 1;
      codes[i] = static_cast<const char*>(rows.values[row]);
      scales[i] = reinterpret_cast<const char*>(rows.scales[row]);
      zero_points[i] = reinterpret_cast<const char*>(rows.zero_points[row]);
      same_zero_points &= zero_points[i] == zero_points[0];
    }
  }
};

// A copy of the last units of eight rows, zeros in the place of what is not there.
template <int plane>
struct Tail {
  char codes[8][kPad * plane] = {};
  float scales[8][kPad] = {}, zero_points[8][kPad] = {};

  Tail(const Rows8& rows, int64_t from, int64_t units, int64_t row_bytes) {
    const int64_t left = row_bytes - from * plane;
    const size_t bytes = static_cast<size_t>(least(left, kPad * plane));
    const size_t floats = static_cast<size_t>(units - from) * 4;
    for (int i = 0; i < 8; ++i) {
      std::memcpy(codes[i], rows.codes[i] + from * plane, bytes);
      std::memcpy(scales[i], rows.scales[i] + from * 4, floats);
      std::memcpy(zero_points[i], rows.zero_points[i] + from * 4, floats);
    }
  }
  Rows8 rows() const {
    Rows8 all;
    all.same_zero_points = false;
    for (int i = 0; i < 8; ++i) {
      all.codes[i] = codes[i];
      all.scales[i] = reinterpret_cast<const char*>(scales[i]);
      all.zero_points[i] = reinterpret_cast<const char*>(zero_points[i]);
    }
    return all;
  }
};

// Calls compute(part, at, u, end) for all units of the eight rows r, r + step, r + 2 step ..: units [u, end), a
// multiple of `some` (up to kPad), are those from `at` on of `part`.
template <int plane, int some, typename Compute>
HINA_INLINE void for_units(const QRows& rows, int r, int step, int64_t units, const Compute& compute) {
  const Rows8 all(rows, r, step);
  const int64_t whole = least(units / some, rows.row_bytes / (some * plane)) * some;
  compute(all, 0, 0, whole);
  if (whole == units) return;
  const Tail<plane> tail(all, whole, units, rows.row_bytes);
  compute(tail.rows(), 0, whole, whole + some);
}

}  // namespace
}  // namespace hina
