// qdot, AVX-512 VNNI. One instruction multiplies 64 weight codes (bytes, unsigned) with 64 token codes.
//
// Token: scales [units], sums [units], each padded to 16 floats; then codes. Tokens for 4-bit weights have two planes
// of them, each padded to 64 bytes: those of even k, which meet the low halves of a row's bytes, and those of odd k.
//
// few   16 rows at a time, from 16 places of a block (ahead.h), lanes along k: 64 bytes of each of four rows against
// the tokens' 64 (or two times 64) codes,
//       then a transpose of four accumulators adds up the lanes of a unit, and one of four such results puts 16 rows
//       into the lanes. Up to four tokens share the unpacked rows.
// pack  16 rows of 64 bytes as a 16 x 16 transpose of dwords: panel = for each 16 rows, for each unit: scales [16],
//       zero points [16], unit / 4 vectors of [16 rows][4 codes].
// many  lanes = rows: a dword of a token's codes is broadcast against 32 rows; up to 6 tokens, 12 accumulators.
//
// Measured 2026-11-29, one thread of an Emerald Rapids VM (VPDPBUSD 610 GOP/s), 32 rows of 2048:
//   many  from 12 tokens on 385 to 415 GOP/s, 63 to 68 % of the peak, with every format
//   pack  2.4 us with int4, 3.3 us with uint8; from 5 tokens on it pays
#include <immintrin.h>

#include "kernels/qdot/ahead.h"
#include "kernels/simd/macros.h"
#include "kernels/tables.h"

namespace hina {
namespace {

constexpr int kLanes = 16;
constexpr int kFewTokens = 4;   // that share unpacked rows
constexpr int kManyTokens = 6;  // of a tile of two groups of rows

HINA_INLINE int64_t units_of(int64_t k, int unit) { return (k + unit - 1) / unit; }
HINA_INLINE int64_t padded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

constexpr bool is_nibbles(WeightFormat format) {
  return format == WeightFormat::kInt4 || format == WeightFormat::kMxfp4;
}

// --- tokens ---

template <bool nibbles>
struct Token {
  char* base;
  int64_t floats;  // of scales, and of sums
  int64_t plane;   // bytes of one plane

  HINA_INLINE Token(const void* token, int64_t k, int unit) {
    const int64_t units = units_of(k, unit);
    base = static_cast<char*>(const_cast<void*>(token));
    floats = padded(units, kLanes);
    plane = padded(units * unit / (nibbles ? 2 : 1), 64);
  }
  HINA_INLINE float* scales() const { return reinterpret_cast<float*>(base); }
  HINA_INLINE float* sums() const { return scales() + floats; }
  HINA_INLINE char* codes() const { return base + floats * 8; }
};

template <bool nibbles>
int64_t token_bytes(int64_t k, int unit) {
  const Token<nibbles> token(nullptr, k, unit);
  return token.floats * 8 + token.plane * (nibbles ? 2 : 1);
}

HINA_INLINE __mmask16 first(int64_t n) { return static_cast<__mmask16>(n >= kLanes ? 0xffff : (1u << n) - 1); }
HINA_INLINE __mmask64 first_bytes(int64_t n) { return n >= 64 ? ~0ull : (1ull << (n < 0 ? 0 : n)) - 1; }

template <bool nibbles>
HINA_INLINE void quantise_unit(const float* x, int64_t n, int64_t u, int unit, const Token<nibbles>& token) {
  const __m512 low = _mm512_maskz_loadu_ps(first(n), x);
  const __m512 high =
      unit == kUnit && n > kLanes ? _mm512_maskz_loadu_ps(first(n - kLanes), x + kLanes) : _mm512_setzero_ps();
  const __m512 size = _mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high));
  const __m512 infinity = _mm512_set1_ps(__builtin_inff());
  const bool finite = (_mm512_cmp_ps_mask(_mm512_abs_ps(low), infinity, _CMP_LT_OQ) &
                       _mm512_cmp_ps_mask(_mm512_abs_ps(high), infinity, _CMP_LT_OQ)) == 0xffff;
  const float amax = _mm512_reduce_max_ps(size);
  const bool used = finite && amax >= 0x1p-100f;
  // Under a mask of all lanes or none: the codes of a unit that is not used are zero.
  const __mmask16 lanes = used ? 0xffff : 0;
  const __m512 inverse = _mm512_set1_ps(127.0f / amax);
  const __m512i a = _mm512_maskz_cvtps_epi32(lanes, _mm512_mul_ps(low, inverse));
  const __m512i b = _mm512_maskz_cvtps_epi32(lanes, _mm512_mul_ps(high, inverse));
  token.scales()[u] = !finite ? __builtin_nanf("") : used ? amax / 127.0f : 0.0f;
  token.sums()[u] = static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(a, b)));
  const __m256i codes = _mm256_set_m128i(_mm512_cvtepi32_epi8(b), _mm512_cvtepi32_epi8(a));
  if constexpr (!nibbles) {
    if (unit == kUnit)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(token.codes() + u * kUnit), codes);
    else
      _mm_storeu_si128(reinterpret_cast<__m128i*>(token.codes() + u * 16), _mm256_castsi256_si128(codes));
  } else {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    const __m256i split = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(codes, order), 0xd8);  // even, odd
    if (unit == kUnit) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(token.codes() + u * 16), _mm256_castsi256_si128(split));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(token.codes() + token.plane + u * 16),
                       _mm256_extracti128_si256(split, 1));
    } else {  // eight of each
      _mm_storel_epi64(reinterpret_cast<__m128i*>(token.codes() + u * 8), _mm256_castsi256_si128(split));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(token.codes() + token.plane + u * 8),
                       _mm256_extracti128_si256(split, 1));
    }
  }
}

template <bool nibbles>
void quantise(const float* x, int64_t from, int64_t to, int64_t k, int unit, void* token) {
  const Token<nibbles> out(token, k, unit);
  for (int64_t i = from; i < to; i += unit)
    quantise_unit(x + (i - from), to - i < unit ? to - i : unit, i / unit, unit, out);
}

// --- rows ---

template <WeightFormat format>
HINA_INLINE __m512i decode(__m512i codes) {
  if constexpr (format == WeightFormat::kInt8)
    return _mm512_xor_si512(codes, _mm512_set1_epi8(static_cast<char>(0x80)));
  if constexpr (format == WeightFormat::kMxfp4)
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(HINA_MXFP4_CODES)), codes);
  return codes;
}

// Low or high halves of bytes, as codes.
template <WeightFormat format>
HINA_INLINE __m512i low_codes(__m512i raw) {
  return decode<format>(_mm512_and_si512(raw, _mm512_set1_epi8(15)));
}
template <WeightFormat format>
HINA_INLINE __m512i high_codes(__m512i raw) {
  return decode<format>(_mm512_and_si512(_mm512_srli_epi16(raw, 4), _mm512_set1_epi8(15)));
}

// Groups of a block of rows: row r is lane r / groups of group r % groups.
HINA_INLINE int groups_of(int rows) { return (rows + kLanes - 1) / kLanes; }

// One group; where a lane has no row, the last row again.
struct Rows16 {
  const char* codes[kLanes];
  const float* scales[kLanes];
  const float* zero_points[kLanes];
  bool same_zero_points = true;

  Rows16(const QRows& rows, int group) {
    for (int i = 0, r = group; i < kLanes; ++i, r += groups_of(rows.n)) {
      const int row = r < rows.n ? r : rows.n - 1;
      codes[i] = static_cast<const char*>(rows.values[row]);
      scales[i] = rows.scales[row];
      zero_points[i] = rows.zero_points[row];
      same_zero_points &= zero_points[i] == zero_points[0];
    }
  }
};

// v[i] lane-of-dword j becomes v[j] dword i.
HINA_INLINE void transpose16(__m512i* v) {
  __m512i t[16];
  HINA_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  HINA_UNROLL
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  HINA_UNROLL
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
  HINA_UNROLL
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// 16 rows of floats, units [u, u + 16), as 16 vectors of rows; what lies beyond `units` is zero.
HINA_INLINE void transpose_floats(const float* const* rows, int64_t u, int64_t units, float* out, int64_t step) {
  const __mmask16 mask = first(units - u);
  __m512i v[16];
  HINA_UNROLL
  for (int r = 0; r < 16; ++r) v[r] = _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, rows[r] + u));
  transpose16(v);
  const int64_t left = units - u;
  HINA_UNROLL
  for (int i = 0; i < 16; ++i)
    if (i < left) _mm512_storeu_ps(out + i * step, _mm512_castsi512_ps(v[i]));
}

// --- few ---

// The lanes of each 128 bits of four vectors added up: [q][r] = sum of the four dwords q of vector r.
HINA_INLINE __m512i add_lanes(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// q[g] = [4 quarters][4 rows of group g] becomes q[i] = quarter i of 16 rows.
HINA_INLINE void gather_quarters(__m512i* q) {
  const __m512i a = _mm512_shuffle_i32x4(q[0], q[1], 0x44), b = _mm512_shuffle_i32x4(q[0], q[1], 0xee);
  const __m512i c = _mm512_shuffle_i32x4(q[2], q[3], 0x44), d = _mm512_shuffle_i32x4(q[2], q[3], 0xee);
  q[0] = _mm512_shuffle_i32x4(a, c, 0x88);
  q[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
  q[2] = _mm512_shuffle_i32x4(b, d, 0x88);
  q[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

template <bool nibbles>
HINA_INLINE int64_t lines_of(int64_t k, int unit) {
  return (units_of(k, unit) * unit / (nibbles ? 2 : 1) + kLine - 1) / kLine;
}

// What belongs to the line of each row that begins at byte `at`.
HINA_INLINE void fetch_ahead(const Rows16& rows, int r, int64_t at, Ahead& ahead) {
  const uintptr_t distance = static_cast<uintptr_t>(at) + ahead.distance(r, at);
  HINA_UNROLL
  for (int i = 0; i < kLanes; ++i) prefetch(address(rows.codes[i]) + distance);
  ahead.fetch_factors();
}

// Scales and zero points of 16 rows for 16 units.
struct Factors {
  alignas(64) float scales[16][kLanes];
  alignas(64) float zero_points[16][kLanes];

  HINA_INLINE void load(const Rows16& rows, int64_t u, int64_t units) {
    transpose_floats(rows.scales, u, units, &scales[0][0], kLanes);
    if (rows.same_zero_points)
      for (int i = 0; i < 16 && u + i < units; ++i)
        _mm512_store_ps(zero_points[i], _mm512_set1_ps(rows.zero_points[0][u + i]));
    else
      transpose_floats(rows.zero_points, u, units, &zero_points[0][0], kLanes);
  }
};

// Lane i of a group is row r + i * groups of n.
HINA_INLINE void store_group(float* out, int r, int groups, int n, __m512 v) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i row = _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(groups)), _mm512_set1_epi32(r));
  _mm512_mask_i32scatter_ps(out, _mm512_cmplt_epi32_mask(row, _mm512_set1_epi32(n)), row, v, 4);
}

template <WeightFormat format, int kTokens>
HINA_INLINE void few_tile(const QRows& rows, const Rows16& group, int r, Ahead& ahead, const void* const* tokens,
                          int64_t k, float* out, int64_t out_stride) {
  constexpr bool nibbles = is_nibbles(format);
  constexpr int kStepUnits = nibbles ? 4 : 2;  // in 64 bytes of a row
  const int64_t units = units_of(k, kUnit);
  const float *scales[kTokens], *sums[kTokens];
  const char *even[kTokens], *odd[kTokens];
  __m512 acc[kTokens];
  HINA_UNROLL
  for (int t = 0; t < kTokens; ++t) {
    const Token<nibbles> token(tokens[t], k, kUnit);
    scales[t] = token.scales();
    sums[t] = token.sums();
    even[t] = token.codes();
    odd[t] = token.codes() + token.plane;
    acc[t] = _mm512_setzero_ps();
  }
  Factors factors;
  for (int64_t u = 0; u < units; u += kStepUnits) {
    if (u % 16 == 0) factors.load(group, u, units);
    const int64_t at = u / kStepUnits * 64;
    fetch_ahead(group, r, at, ahead);
    const __mmask64 mask = first_bytes(rows.row_bytes - at);
    __m512i q[kTokens][4];
    HINA_UNROLL
    for (int g = 0; g < 4; ++g) {
      __m512i low[4], high[4];
      HINA_UNROLL
      for (int r = 0; r < 4; ++r) {
        const __m512i raw = _mm512_maskz_loadu_epi8(mask, group.codes[4 * g + r] + at);
        low[r] = nibbles ? low_codes<format>(raw) : decode<format>(raw);
        if (nibbles) high[r] = high_codes<format>(raw);
      }
      HINA_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        const __m512i xe = _mm512_loadu_si512(even[t] + at);
        __m512i d[4];
        HINA_UNROLL
        for (int r = 0; r < 4; ++r) d[r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low[r], xe);
        if constexpr (nibbles) {
          const __m512i xo = _mm512_loadu_si512(odd[t] + at);
          HINA_UNROLL
          for (int r = 0; r < 4; ++r) d[r] = _mm512_dpbusd_epi32(d[r], high[r], xo);
        }
        q[t][g] = add_lanes(d[0], d[1], d[2], d[3]);
      }
    }
    HINA_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      gather_quarters(q[t]);
      if constexpr (!nibbles) {
        q[t][0] = _mm512_add_epi32(q[t][0], q[t][1]);
        q[t][1] = _mm512_add_epi32(q[t][2], q[t][3]);
      }
    }
    HINA_UNROLL
    for (int i = 0; i < kStepUnits; ++i) {
      if (u + i >= units) break;
      const __m512 ws = _mm512_load_ps(factors.scales[(u + i) % 16]);
      const __m512 zp = _mm512_load_ps(factors.zero_points[(u + i) % 16]);
      HINA_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        const __m512 dp = _mm512_cvtepi32_ps(q[t][i]);
        const __m512 shifted = _mm512_fnmadd_ps(zp, _mm512_set1_ps(sums[t][u + i]), dp);
        acc[t] = _mm512_fmadd_ps(shifted, _mm512_mul_ps(ws, _mm512_set1_ps(scales[t][u + i])), acc[t]);
      }
    }
  }
  HINA_UNROLL
  for (int t = 0; t < kTokens; ++t) store_group(out + t * out_stride, r, groups_of(rows.n), rows.n, acc[t]);
}

template <WeightFormat format>
void few(const QRows& rows, const void* const* tokens, int n_tokens, int64_t k, float* out, int64_t out_stride) {
  Ahead ahead(rows, groups_of(rows.n), lines_of<is_nibbles(format)>(k, kUnit));
  for (int r = 0; r < groups_of(rows.n); ++r) {
    const Rows16 group(rows, r);
    for (int t = 0; t < n_tokens; t += kFewTokens) {
      const void* const* x = tokens + t;
      float* y = out + t * out_stride;
      switch (n_tokens - t) {
        case 1:
          few_tile<format, 1>(rows, group, r, ahead, x, k, y, out_stride);
          break;
        case 2:
          few_tile<format, 2>(rows, group, r, ahead, x, k, y, out_stride);
          break;
        case 3:
          few_tile<format, 3>(rows, group, r, ahead, x, k, y, out_stride);
          break;
        default:
          few_tile<format, 4>(rows, group, r, ahead, x, k, y, out_stride);
      }
    }
  }
}

// --- pack and many ---

// Floats of one unit of 16 rows in a panel: scales, zero points, codes.
HINA_INLINE int64_t unit_floats(int unit) { return 2 * kLanes + unit / 4 * kLanes; }

int64_t panel_bytes(int64_t k, int unit) { return kMaxQRows / kLanes * units_of(k, unit) * unit_floats(unit) * 4; }

template <WeightFormat format>
HINA_INLINE void pack_group(const Rows16& rows, int64_t row_bytes, int r, Ahead& ahead, int unit, int64_t k,
                            float* panel) {
  constexpr bool nibbles = is_nibbles(format);
  const int64_t units = units_of(k, unit), step = unit_floats(unit);
  const int dwords = unit / (nibbles ? 8 : 4);  // of a row's bytes in a unit
  const int64_t all = units * dwords;
  for (int64_t from = 0; from < all; from += 16) {
    const __mmask64 mask = first_bytes(row_bytes - from * 4);
    __m512i v[16];
    fetch_ahead(rows, r, from * 4, ahead);
    HINA_UNROLL
    for (int i = 0; i < 16; ++i) v[i] = _mm512_maskz_loadu_epi8(mask, rows.codes[i] + from * 4);
    transpose16(v);
    HINA_UNROLL
    for (int i = 0; i < 16; ++i) {
      if (from + i >= all) break;
      float* to = panel + (from + i) / dwords * step + (2 + (from + i) % dwords) * kLanes;
      _mm512_storeu_si512(to, nibbles ? low_codes<format>(v[i]) : decode<format>(v[i]));
      if (nibbles) _mm512_storeu_si512(to + dwords * kLanes, high_codes<format>(v[i]));
    }
  }
}

template <WeightFormat format>
void pack(const QRows& rows, int64_t k, void* panel) {
  const int64_t units = units_of(k, rows.unit), step = unit_floats(rows.unit);
  Ahead ahead(rows, groups_of(rows.n), lines_of<is_nibbles(format)>(k, rows.unit));
  for (int r = 0; r < groups_of(rows.n); ++r) {
    const Rows16 group(rows, r);
    float* to = static_cast<float*>(panel) + r * units * step;
    for (int64_t u = 0; u < units; u += 16) {
      transpose_floats(group.scales, u, units, to + u * step, step);
      transpose_floats(group.zero_points, u, units, to + u * step + kLanes, step);
    }
    if (rows.unit == kUnit)
      pack_group<format>(group, rows.row_bytes, r, ahead, kUnit, k, to);
    else
      pack_group<format>(group, rows.row_bytes, r, ahead, 16, k, to);
  }
}

template <bool nibbles, int kGroups, int kTokens, int kUnitSize>
HINA_INLINE void many_tile(const float* panel, const void* const* tokens, int64_t k, float* out, int64_t out_stride,
                           int n_rows) {
  constexpr int kCodeVectors = kUnitSize / 4, kDwords = nibbles ? kCodeVectors / 2 : kCodeVectors;
  const int64_t units = units_of(k, kUnitSize), step = unit_floats(kUnitSize);
  const Token<nibbles> layout(nullptr, k, kUnitSize);
  __m512 acc[kGroups][kTokens];
  HINA_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    HINA_UNROLL
    for (int t = 0; t < kTokens; ++t) acc[g][t] = _mm512_setzero_ps();
  }
  for (int64_t u = 0; u < units; ++u) {
    const float* at[kGroups];
    HINA_UNROLL
    for (int g = 0; g < kGroups; ++g) at[g] = panel + (g * units + u) * step;
    __m512i dp[kGroups][kTokens];
    HINA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      HINA_UNROLL
      for (int t = 0; t < kTokens; ++t) dp[g][t] = _mm512_setzero_si512();
    }
    HINA_UNROLL
    for (int j = 0; j < kCodeVectors; ++j) {
      const int64_t code = layout.floats * 8 + (j < kDwords ? 0 : layout.plane) + (u * kDwords + j % kDwords) * 4;
      __m512i w[kGroups];
      HINA_UNROLL
      for (int g = 0; g < kGroups; ++g) w[g] = _mm512_loadu_si512(at[g] + (2 + j) * kLanes);
      HINA_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        int dword;
        __builtin_memcpy(&dword, static_cast<const char*>(tokens[t]) + code, 4);
        const __m512i x = _mm512_set1_epi32(dword);
        HINA_UNROLL
        for (int g = 0; g < kGroups; ++g) dp[g][t] = _mm512_dpbusd_epi32(dp[g][t], w[g], x);
      }
    }
    HINA_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      const float* factors = static_cast<const float*>(tokens[t]);
      const __m512 xs = _mm512_set1_ps(factors[u]), sum = _mm512_set1_ps(factors[layout.floats + u]);
      HINA_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        const __m512 shifted = _mm512_fnmadd_ps(_mm512_loadu_ps(at[g] + kLanes), sum, _mm512_cvtepi32_ps(dp[g][t]));
        acc[g][t] = _mm512_fmadd_ps(shifted, _mm512_mul_ps(_mm512_loadu_ps(at[g]), xs), acc[g][t]);
      }
    }
  }
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  HINA_UNROLL
  for (int t = 0; t < kTokens; ++t) {
    float* to = out + t * out_stride;
    if constexpr (kGroups == 1) {
      _mm512_mask_storeu_ps(to, first(n_rows), acc[0][t]);
    } else {  // of which one has the even rows, one the odd
      _mm512_storeu_ps(to, _mm512_permutex2var_ps(acc[0][t], low, acc[1][t]));
      _mm512_mask_storeu_ps(to + kLanes, first(n_rows - kLanes), _mm512_permutex2var_ps(acc[0][t], high, acc[1][t]));
    }
  }
}

template <bool nibbles, int kGroups, int kUnitSize>
HINA_INLINE void many_groups(const float* panel, const void* const* tokens, int n_tokens, int64_t k, float* out,
                             int64_t out_stride, int n_rows) {
  int t = 0;
  for (; t + kManyTokens <= n_tokens; t += kManyTokens)
    many_tile<nibbles, kGroups, kManyTokens, kUnitSize>(panel, tokens + t, k, out + t * out_stride, out_stride, n_rows);
  const void* const* x = tokens + t;
  float* y = out + t * out_stride;
  switch (n_tokens - t) {
    case 5:
      many_tile<nibbles, kGroups, 5, kUnitSize>(panel, x, k, y, out_stride, n_rows);
      break;
    case 4:
      many_tile<nibbles, kGroups, 4, kUnitSize>(panel, x, k, y, out_stride, n_rows);
      break;
    case 3:
      many_tile<nibbles, kGroups, 3, kUnitSize>(panel, x, k, y, out_stride, n_rows);
      break;
    case 2:
      many_tile<nibbles, kGroups, 2, kUnitSize>(panel, x, k, y, out_stride, n_rows);
      break;
    case 1:
      many_tile<nibbles, kGroups, 1, kUnitSize>(panel, x, k, y, out_stride, n_rows);
      break;
  }
}

template <bool nibbles>
void many(const void* panel, int n_rows, int unit, const void* const* tokens, int n_tokens, int64_t k, float* out,
          int64_t out_stride) {
  const float* p = static_cast<const float*>(panel);
  if (unit == kUnit && n_rows > kLanes)
    many_groups<nibbles, 2, kUnit>(p, tokens, n_tokens, k, out, out_stride, n_rows);
  else if (unit == kUnit)
    many_groups<nibbles, 1, kUnit>(p, tokens, n_tokens, k, out, out_stride, n_rows);
  else if (n_rows > kLanes)
    many_groups<nibbles, 2, 16>(p, tokens, n_tokens, k, out, out_stride, n_rows);
  else
    many_groups<nibbles, 1, 16>(p, tokens, n_tokens, k, out, out_stride, n_rows);
}

template <WeightFormat format>
constexpr QDotKernel entry(const char* name, int pack_from) {
  constexpr bool nibbles = is_nibbles(format);
  return {name,        Isa::kAvx512Vnni, format,       pack_from,    16, token_bytes<nibbles>, quantise<nibbles>,
          few<format>, panel_bytes,      pack<format>, many<nibbles>};
}

}  // namespace

const QDotKernel kQDotAvx512Vnni[kQuantisedFormats] = {
    entry<WeightFormat::kUint8>("qdot_uint8_avx512_vnni", 5),
    entry<WeightFormat::kInt8>("qdot_int8_avx512_vnni", 5),
    entry<WeightFormat::kInt4>("qdot_int4_avx512_vnni", 5),
    entry<WeightFormat::kMxfp4>("qdot_mxfp4_avx512_vnni", 5),
};

}  // namespace hina
