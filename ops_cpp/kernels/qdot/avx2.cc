// qdot, AVX2 + FMA.
//
// few   8 rows x 2 tokens or 1, lanes along k. Eight vectors of products are added up crosswise into one that has a row
//       in each lane. All of k for 8 rows, from 8 places of the block (ahead.h): sums in registers, the rows' scales
//       and zero points transposed 16 units at a time. The last units are copied to where zeros can follow them.
// many  16 rows x 4 tokens (or 3, 2, 1; mxfp4: twice 8 rows), rows in the lanes: eight integer sums, two vectors of
//       codes and one of four bytes of a token, broadcast. The float sums stay in the L1 cache, as do 16 units of 16
//       rows while the tokens pass by.
//       A panel: for each group of 8 rows, for each unit: scales [8], zero points [8], then dwords of codes [8], those
//       of even k first.
//
// Measured 2026-11-29, one thread of an Emerald Rapids VM, 32 rows, k = 2048. `many` with 16 tokens or more has 78 % of
// the peak of two maddubs and a madd for int4 (172 GOP/s), 75 % for mxfp4, 88 % of that of madd and add for 8 bits (105
// GOP/s). Layers of one token whose rows lie in the L2 cache take nibbles and their scales at
// 15 GB/s, bytes at 20. `pack` takes 100 ns a row, 190 of bytes.
#include "kernels/qdot/ahead.h"
#include "kernels/qdot/avx2_rows.h"
#include "kernels/qdot/avx2_token.h"
#include "kernels/tables.h"

namespace hina {
namespace {

constexpr int kGroup = 8;        // rows of a panel that lie together
constexpr int kBlockUnits = 16;  // units of k that are used for all tokens before the next ones
constexpr int kFewTokens = 8;    // tokens of `few` for which a block of rows is used
constexpr int kManyTokens = 32;  // and those of `many`

template <Format format>
constexpr int kStep = 32 / kPlane<format, kUnit>;  // units of 32 in a vector of a row
template <Format format>
constexpr int kLineUnits = kLine / kPlane<format, kUnit>;

// Groups of a block of rows: row r is lane r / groups of group r % groups.
HINA_INLINE int groups_of(int rows) { return (rows + kGroup - 1) / kGroup; }

template <Format format, int unit>
int64_t lines_of(int64_t units) {
  return (units * kPlane<format, unit> + kLine - 1) / kLine;
}

template <Format format, int unit>
constexpr int kUnitPanel = kGroup * (8 + 2 * kPlane<format, unit>);

template <Format format, int unit>
int64_t group_bytes(int64_t units) {
  return round_up(units, kPad) * kUnitPanel<format, unit>;
}

HINA_INLINE __m256i broadcast4(const char* at) {
  int dword;
  std::memcpy(&dword, at, 4);
  return _mm256_set1_epi32(dword);
}

// Lane i is row r + i * step of n.
HINA_INLINE void store_rows(float* out, int r, int step, int n, __m256 v) {
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, v);
  for (int i = 0; r < n && i < 8; ++i, r += step) out[r] = lanes[i];
}

// Lanes i of two groups are rows r + i * step of n, and the next ones.
HINA_INLINE void store_rows(float* out, int r, int step, int n, __m256 first, __m256 second) {
  if (n < kGroup * step) {
    store_rows(out, r, step, n, first);
    store_rows(out, r + 1, step, n, second);
    return;
  }
  const __m256 pairs[2] = {_mm256_unpacklo_ps(first, second), _mm256_unpackhi_ps(first, second)};  // 0 1 4 5, 2 3 6 7
  HINA_UNROLL
  for (int half = 0; half < 2; ++half) {
    HINA_UNROLL
    for (int i = 0; i < 2; ++i) {
      const __m128 v = half == 0 ? _mm256_castps256_ps128(pairs[i]) : _mm256_extractf128_ps(pairs[i], 1);
      float* to = out + r + (4 * half + 2 * i) * step;
      _mm_storel_pi(reinterpret_cast<__m64*>(to), v);
      _mm_storeh_pi(reinterpret_cast<__m64*>(to + step), v);
    }
  }
}

HINA_INLINE __m256 accumulate(__m256i dot, __m256 ws, __m256 zero_point, float xs, float sum, __m256 acc) {
  const __m256 inner = _mm256_fnmadd_ps(zero_point, _mm256_set1_ps(sum), _mm256_cvtepi32_ps(dot));
  return _mm256_fmadd_ps(inner, _mm256_mul_ps(ws, _mm256_set1_ps(xs)), acc);
}

// Bytes [offset, offset + 32) of four rows times those of kN tokens; lane r of either half of a sum belongs to row r.
// int16 takes the 16 products of int4 that are added in it, 16 * 15 * 127 = 30480, and 8 of mxfp4, which are 24384.
template <Format format, int kN>
HINA_INLINE void four_rows(const char* const* rows, int64_t offset, const __m256i (&x)[2][kN], __m256i* sums) {
  __m256i pairs[kN][2];
  HINA_UNROLL
  for (int p = 0; p < 2; ++p) {
    __m256i products[kN][2];
    HINA_UNROLL
    for (int i = 0; i < 2; ++i) {
      __m256i row = load(rows[2 * p + i] + offset), even, odd;
      __asm__("" : "+x"(row));  // else GCC stores it and loads it twice
      split<format>(row, even, odd);
      HINA_UNROLL
      for (int t = 0; t < kN; ++t)
        products[t][i] = add<format>(multiply<format>(even, x[0][t]), multiply<format>(odd, x[1][t]));
    }
    HINA_UNROLL
    for (int t = 0; t < kN; ++t) {
      pairs[t][p] = add<format>(_mm256_unpacklo_epi32(products[t][0], products[t][1]),
                                _mm256_unpackhi_epi32(products[t][0], products[t][1]));
      if constexpr (format == Format::kMxfp4) pairs[t][p] = to_int32<format>(pairs[t][p]);
    }
  }
  HINA_UNROLL
  for (int t = 0; t < kN; ++t) {
    const __m256i low = _mm256_unpacklo_epi64(pairs[t][0], pairs[t][1]);
    const __m256i high = _mm256_unpackhi_epi64(pairs[t][0], pairs[t][1]);
    sums[t] = format == Format::kInt4 ? to_int32<format>(add<format>(low, high)) : _mm256_add_epi32(low, high);
  }
}

// What belongs to the line of each row that begins at byte `at`.
HINA_INLINE void fetch_ahead(const Rows8& rows, int r, int64_t at, Ahead& ahead) {
  const uintptr_t distance = static_cast<uintptr_t>(at) + ahead.distance(r, at);
  HINA_UNROLL
  for (int i = 0; i < 8; ++i) prefetch(address(rows.codes[i]) + distance);
  ahead.fetch_factors();
}

// Units of eight rows: their scales with the rows in the lanes, and their zero points likewise, or those that all rows
// share, each broadcast as it is used.
template <bool shared>
struct Block {
  const Rows8* rows;
  int64_t at;  // the first unit, in `rows`
  int units;
  alignas(32) float scales[kBlockUnits][8];
  alignas(32) float zero_points[shared ? 1 : kBlockUnits][8];

  void fill() {
    for (int i = 0; i < units; i += kPad) {
      __m256i v[4];
      transpose(rows->scales, (at + i) * 4, v);
      HINA_UNROLL
      for (int j = 0; j < 4; ++j) store(scales[i + j], v[j]);
      if constexpr (!shared) {
        transpose(rows->zero_points, (at + i) * 4, v);
        HINA_UNROLL
        for (int j = 0; j < 4; ++j) store(zero_points[i + j], v[j]);
      }
    }
  }
  HINA_INLINE __m256 zero_points_of(const char* first, int i) const {
    if constexpr (shared) return _mm256_castsi256_ps(broadcast4(first + i * 4));
    return _mm256_load_ps(zero_points[shared ? 0 : i]);
  }
};

// 32 bytes of each row of the block times kN tokens: its unit i, which is the tokens' unit u, of nibbles also the next.
template <Format format, int kN, bool shared>
HINA_INLINE void few_step(const Block<shared>& block, const char* zero_points, int i,
                          const Token<format, kUnit>* tokens, int64_t u, __m256* acc) {
  const int64_t offset = (block.at + i) * kPlane<format, kUnit>;
  __m256i x[2][kN], low[kN], high[kN];
  HINA_UNROLL
  for (int t = 0; t < kN; ++t) {
    x[0][t] = load(tokens[t].planes[0] + u * kPlane<format, kUnit>);
    x[1][t] = load(tokens[t].planes[1] + u * kPlane<format, kUnit>);
  }
  four_rows<format, kN>(block.rows->codes, offset, x, low);
  four_rows<format, kN>(block.rows->codes + 4, offset, x, high);
  HINA_UNROLL
  for (int t = 0; t < kN; ++t) {
    __m256i dots[2] = {_mm256_permute2x128_si256(low[t], high[t], 0x20),
                       _mm256_permute2x128_si256(low[t], high[t], 0x31)};
    if constexpr (!kNibbles<format>) dots[0] = _mm256_add_epi32(dots[0], dots[1]);
    HINA_UNROLL
    for (int j = 0; j < kStep<format>; ++j)
      acc[t] = accumulate(dots[j], _mm256_load_ps(block.scales[i + j]), block.zero_points_of(zero_points, i + j),
                          tokens[t].scales[u + j], tokens[t].sums[u + j], acc[t]);
  }
}

template <Format format, int kN, bool shared, bool fetch>
HINA_INLINE void few_tokens(const Block<shared>& block, const Token<format, kUnit>* all, int64_t u, Ahead& ahead, int r,
                            __m256* acc) {
  Token<format, kUnit> tokens[kN];
  __m256 sums[kN];
  HINA_UNROLL
  for (int t = 0; t < kN; ++t) tokens[t] = all[t], sums[t] = acc[t];
  const char* zero_points = block.rows->zero_points[0] + block.at * 4;
  int i = 0;
  for (; i + kLineUnits<format> <= block.units; i += kLineUnits<format>) {
    if constexpr (fetch) fetch_ahead(*block.rows, r, (block.at + i) * kPlane<format, kUnit>, ahead);
    HINA_UNROLL
    for (int j = 0; j < kLineUnits<format>; j += kStep<format>)
      few_step<format, kN, shared>(block, zero_points, i + j, tokens, u + i + j, sums);
  }
  if (i < block.units) few_step<format, kN, shared>(block, zero_points, i, tokens, u + i, sums);
  HINA_UNROLL
  for (int t = 0; t < kN; ++t) acc[t] = sums[t];
}

// Units [u, end) of the tokens, which are those from `at` on of the rows.
template <Format format, bool shared>
void few_units(const Rows8& rows, int64_t at, int64_t u, int64_t end, const Token<format, kUnit>* tokens, int n,
               Ahead& ahead, int r, __m256* acc) {
  Block<shared> block;
  for (; u < end; u += kBlockUnits, at += kBlockUnits) {
    block.rows = &rows;
    block.at = at;
    block.units = static_cast<int>(least(end - u, kBlockUnits));
    block.fill();
    if (n == 1) {
      few_tokens<format, 1, shared, true>(block, tokens, u, ahead, r, acc);
      continue;
    }
    few_tokens<format, 2, shared, true>(block, tokens, u, ahead, r, acc);
    int t = 2;
    for (; t + 2 <= n; t += 2) few_tokens<format, 2, shared, false>(block, tokens + t, u, ahead, r, acc + t);
    if (t < n) few_tokens<format, 1, shared, false>(block, tokens + t, u, ahead, r, acc + t);
  }
}

template <Format format>
void few(const QRows& rows, const void* const* tokens, int n_tokens, int64_t k, float* out, int64_t out_stride) {
  const int64_t units = units_of(k, kUnit);
  for (int t0 = 0; t0 < n_tokens; t0 += kFewTokens) {
    const int n = static_cast<int>(least(n_tokens - t0, kFewTokens));
    Token<format, kUnit> x[kFewTokens];
    for (int t = 0; t < n; ++t) x[t] = Token<format, kUnit>(tokens[t0 + t], units);
    const int step = groups_of(rows.n);
    Ahead ahead(rows, step, lines_of<format, kUnit>(units));
    for (int r = 0; r < step; ++r) {
      __m256 acc[kFewTokens] = {};
      for_units<kPlane<format, kUnit>, kStep<format>>(
          rows, r, step, units, [&](const Rows8& part, int64_t at, int64_t u, int64_t end) {
            const auto multiply = part.same_zero_points ? few_units<format, true> : few_units<format, false>;
            multiply(part, at, u, end, x, n, ahead, r, acc);
          });
      for (int t = 0; t < n; ++t) store_rows(out + (t0 + t) * out_stride, r, step, rows.n, acc[t]);
    }
  }
}

// Units [u, end) of a group of rows, which are those from `at` on of `rows`. Whole lines are written one after another.
template <Format format, int unit>
void pack_units(const Rows8& rows, int64_t at, int64_t u, int64_t end, Ahead& ahead, int r, char* group) {
  constexpr int kDwords = kPlane<format, unit> / 4;  // of a row, in a unit
  for (; u < end; u += kPad, at += kPad) {
    for (int64_t line = 0; line < kPad * kPlane<format, unit>; line += kLine)
      fetch_ahead(rows, r, at * kPlane<format, unit> + line, ahead);
    char* to = group + u * kUnitPanel<format, unit>;
    __m256i scales[4], zero_points[4];
    transpose(rows.scales, at * 4, scales);
    transpose(rows.zero_points, at * 4, zero_points);
    HINA_UNROLL
    for (int i = 0; i < 4; ++i) {
      store(to + i * kUnitPanel<format, unit>, scales[i]);
      store(to + i * kUnitPanel<format, unit> + 32, zero_points[i]);
    }
    HINA_UNROLL
    for (int d = 0; d < kPad * kDwords; d += 4) {
      __m256i codes[2][4];
      transpose(rows.codes, at * kPlane<format, unit> + d * 4, codes[0]);
      HINA_UNROLL
      for (int i = 0; i < 4; ++i) split<format>(codes[0][i], codes[0][i], codes[1][i]);
      HINA_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int plane = i / 4, dword = d + i % 4;
        char* codes_to = to + dword / kDwords * kUnitPanel<format, unit> + 64;
        store(codes_to + (plane * kDwords + dword % kDwords) * 32, codes[plane][i % 4]);
      }
    }
  }
}

// `many` takes groups by twos: where the second has no rows, it is filled with the last row.
template <Format format, int unit>
void pack_of(const QRows& rows, int64_t k, char* panel) {
  const int64_t units = units_of(k, unit);
  const int step = groups_of(rows.n);
  Ahead ahead(rows, step, lines_of<format, unit>(units));
  for (int r = 0; r < round_up(step, 2); ++r, panel += group_bytes<format, unit>(units))
    for_units<kPlane<format, unit>, kPad>(rows, r, step, units,
                                          [&](const Rows8& part, int64_t at, int64_t u, int64_t end) {
                                            pack_units<format, unit>(part, at, u, end, ahead, r, panel);
                                          });
}

// Groups of rows that are multiplied at a time. int16 takes the products of a unit of int4, 16 * 15 * 127 = 30480, but
// of mxfp4 only half of them: those of one plane are widened before the next, which needs the registers.
template <Format format>
constexpr int kGroups = format == Format::kMxfp4 ? 1 : 2;

// kGroups groups of rows x kN tokens x one unit.
template <Format format, int unit, int kN>
HINA_INLINE void unit_dots(const char* codes, int64_t group, const Token<format, unit>* tokens, int64_t u,
                           __m256i (&dots)[kN][kGroups<format>]) {
  constexpr int kDwords = kPlane<format, unit> / 4;
  __m256i sums[kN][kGroups<format>];
  HINA_UNROLL
  for (int d = 0; d < 2 * kDwords; ++d) {
    const bool first = d == 0 || (format == Format::kMxfp4 && d == kDwords);
    __m256i w[kGroups<format>];
    HINA_UNROLL
    for (int g = 0; g < kGroups<format>; ++g) w[g] = load(codes + g * group + d * 32);
    HINA_UNROLL
    for (int t = 0; t < kN; ++t) {
      const __m256i x = broadcast4(tokens[t].planes[d / kDwords] + u * kPlane<format, unit> + d % kDwords * 4);
      HINA_UNROLL
      for (int g = 0; g < kGroups<format>; ++g) {
        const __m256i products = multiply<format>(w[g], x);
        sums[t][g] = first ? products : add<format>(sums[t][g], products);
        __asm__("" : "+x"(sums[t][g]));  // else GCC makes a tree of the sum, and is out of registers
      }
    }
    if (format == Format::kMxfp4 && d == kDwords - 1) {
      HINA_UNROLL
      for (int t = 0; t < kN; ++t) dots[t][0] = to_int32<format>(sums[t][0]);
    }
  }
  HINA_UNROLL
  for (int t = 0; t < kN; ++t) {
    HINA_UNROLL
    for (int g = 0; g < kGroups<format>; ++g) {
      const __m256i last = to_int32<format>(sums[t][g]);
      dots[t][g] = format == Format::kMxfp4 ? _mm256_add_epi32(dots[t][g], last) : last;
    }
  }
}

// The same for units [u, end), added to `acc`: for each token the sums of 16 rows, of which these are the first.
template <Format format, int unit, int kN>
HINA_INLINE void tile(const char* panel, int64_t group, const Token<format, unit>* all, int64_t u, int64_t end,
                      float* acc) {
  Token<format, unit> tokens[kN];
  HINA_UNROLL
  for (int t = 0; t < kN; ++t) tokens[t] = all[t];
  for (; u < end; ++u) {
    const char* at = panel + u * kUnitPanel<format, unit>;
    __m256i dots[kN][kGroups<format>];
    unit_dots<format, unit, kN>(at + 64, group, tokens, u, dots);
    HINA_UNROLL
    for (int g = 0; g < kGroups<format>; ++g) {
      const float* floats = reinterpret_cast<const float*>(at + g * group);
      const __m256 scales = _mm256_loadu_ps(floats), zero_points = _mm256_loadu_ps(floats + 8);
      HINA_UNROLL
      for (int t = 0; t < kN; ++t) {
        float* to = acc + t * 2 * kGroup + g * kGroup;
        _mm256_store_ps(to, accumulate(dots[t][g], scales, zero_points, tokens[t].scales[u], tokens[t].sums[u],
                                       _mm256_load_ps(to)));
      }
    }
  }
}

// Two groups of rows x n tokens x units [u, end).
template <Format format, int unit>
void tiles(const char* panel, int64_t group, const Token<format, unit>* x, int n, int64_t u, int64_t end, float* acc) {
  for (int g = 0; g < 2; g += kGroups<format>, panel += group, acc += kGroup) {
    int t = 0;
    for (; t + 4 <= n; t += 4) tile<format, unit, 4>(panel, group, x + t, u, end, acc + t * 2 * kGroup);
    if (n - t == 3) tile<format, unit, 3>(panel, group, x + t, u, end, acc + t * 2 * kGroup);
    if (n - t == 2) tile<format, unit, 2>(panel, group, x + t, u, end, acc + t * 2 * kGroup);
    if (n - t == 1) tile<format, unit, 1>(panel, group, x + t, u, end, acc + t * 2 * kGroup);
  }
}

template <Format format, int unit>
void many_of(const char* panel, int n_rows, const void* const* tokens, int n_tokens, int64_t k, float* out,
             int64_t out_stride) {
  const int64_t units = units_of(k, unit), group = group_bytes<format, unit>(units);
  const int step = groups_of(n_rows);
  for (int t0 = 0; t0 < n_tokens; t0 += kManyTokens) {
    const int n = static_cast<int>(least(n_tokens - t0, kManyTokens));
    Token<format, unit> x[kManyTokens];
    for (int t = 0; t < n; ++t) x[t] = Token<format, unit>(tokens[t0 + t], units);
    for (int r = 0; r < step; r += 2) {
      alignas(32) float acc[kManyTokens][2 * kGroup] = {};
      for (int64_t u = 0; u < units; u += kBlockUnits)
        tiles<format, unit>(panel + r * group, group, x, n, u, least(units, u + kBlockUnits), acc[0]);
      for (int t = 0; t < n; ++t) {
        float* to = out + (t0 + t) * out_stride;
        if (r + 1 < step)
          store_rows(to, r, step, n_rows, _mm256_load_ps(acc[t]), _mm256_load_ps(acc[t] + kGroup));
        else
          store_rows(to, r, step, n_rows, _mm256_load_ps(acc[t]));
      }
    }
  }
}

template <Format format>
int64_t token_bytes(int64_t k, int unit) {
  const int64_t units = units_of(k, unit);
  return unit == kUnit ? Token<format, kUnit>::bytes(units) : Token<format, kUnit / 2>::bytes(units);
}

template <Format format>
void quantise(const float* x, int64_t from, int64_t to, int64_t k, int unit, void* token) {
  (unit == kUnit ? quantise_of<format, kUnit> : quantise_of<format, kUnit / 2>)(x, to - from, units_of(k, unit),
                                                                                from / unit, token);
}

template <Format format>
int64_t panel_bytes(int64_t k, int unit) {
  const int64_t units = units_of(k, unit);
  return kMaxQRows / kGroup *
         (unit == kUnit ? group_bytes<format, kUnit>(units) : group_bytes<format, kUnit / 2>(units));
}

template <Format format>
void pack(const QRows& rows, int64_t k, void* panel) {
  (rows.unit == kUnit ? pack_of<format, kUnit> : pack_of<format, kUnit / 2>)(rows, k, static_cast<char*>(panel));
}

template <Format format>
void many(const void* panel, int n_rows, int unit, const void* const* tokens, int n_tokens, int64_t k, float* out,
          int64_t out_stride) {
  (unit == kUnit ? many_of<format, kUnit> : many_of<format, kUnit / 2>)(static_cast<const char*>(panel), n_rows, tokens,
                                                                        n_tokens, k, out, out_stride);
}

template <Format format>
constexpr QDotKernel entry(const char* name, int pack_from) {
  constexpr Format kPacked = format == Format::kInt8 ? Format::kUint8 : format;  // pack makes the one of the other
  return {name,        Isa::kAvx2,          format,       pack_from,    8, token_bytes<format>, quantise<kPacked>,
          few<format>, panel_bytes<format>, pack<format>, many<kPacked>};
}

}  // namespace

const QDotKernel kQDotAvx2[kQuantisedFormats] = {
    entry<Format::kUint8>("qdot_uint8_avx2", 7),
    entry<Format::kInt8>("qdot_int8_avx2", 7),
    entry<Format::kInt4>("qdot_int4_avx2", 6),
    entry<Format::kMxfp4>("qdot_mxfp4_avx2", 5),
};

}  // namespace hina
