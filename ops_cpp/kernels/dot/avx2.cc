// dot, AVX2 + FMA + F16C. Tiles of rows x tokens:
//   4 x 3  twelve accumulators, three tokens and one row in registers: 7 loads for 12 FMAs (many tokens)
//   4 x 2, 4 x 1 for the last tokens; 8 x 1 for one token: eight row streams, enough chains to cover FMA latency
//   1 x 3, 1 x 2, 1 x 1 for the last rows
// Every result has ONE accumulator of eight lanes, stepped through k by eight and reduced in one fixed order, whatever
// the tile: that is what makes results independent of the batch. The last k % 8 elements are loaded under a mask
// (float32) or through a zeroed buffer (16-bit types); both add exact zeros in the lanes beyond k.
#include <immintrin.h>

#include <cstring>

#include "kernels/tables.h"

#define HINA_INLINE inline __attribute__((always_inline))
#define HINA_UNROLL _Pragma("GCC unroll 16")

namespace hina {
namespace {

constexpr int kLanes = 8;
constexpr int kTriples = 8;      // triples of tokens against one block of rows
constexpr int64_t kBlock = 512;  // elements of k: 4 rows x 512 float32 are 8 KiB

template <DataType type>
constexpr int64_t kSize = type == DataType::kFloat32 ? 4 : 2;

template <DataType type>
HINA_INLINE __m256 widen(const char* at) {
  if constexpr (type == DataType::kFloat32) return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  if constexpr (type == DataType::kFloat16) return _mm256_cvtph_ps(raw);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

HINA_INLINE __m256i tail_mask(int64_t left) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(left)), lane);
}

template <DataType type>
HINA_INLINE __m256 widen_tail(const char* at, int64_t left) {
  if constexpr (type == DataType::kFloat32)
    return _mm256_maskload_ps(reinterpret_cast<const float*>(at), tail_mask(left));
  alignas(16) char part[16] = {};
  std::memcpy(part, at, static_cast<size_t>(left) * 2);
  return widen<type>(part);
}

// ((s0 + s1) + (s2 + s3)) of s = lower + upper half; horizontal adds of four rows at once keep that order.
HINA_INLINE __m128 fold(__m256 v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }

template <int kRows>
HINA_INLINE void reduce(const __m256* acc, int64_t acc_stride, float* out) {
  if constexpr (kRows % 4 == 0) {
    HINA_UNROLL
    for (int r = 0; r < kRows; r += 4) {
      const __m128 ab = _mm_hadd_ps(fold(acc[r * acc_stride]), fold(acc[(r + 1) * acc_stride]));
      const __m128 cd = _mm_hadd_ps(fold(acc[(r + 2) * acc_stride]), fold(acc[(r + 3) * acc_stride]));
      _mm_storeu_ps(out + r, _mm_hadd_ps(ab, cd));
    }
  } else {
    HINA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const __m128 s = fold(acc[r * acc_stride]);
      const __m128 pairs = _mm_hadd_ps(s, s);
      _mm_store_ss(out + r, _mm_hadd_ps(pairs, pairs));
    }
  }
}

// One tile of accumulators; `load` and `store` park it between blocks of k.
template <int kRows, int kTokens>
struct Tile {
  __m256 acc[kRows][kTokens];

  HINA_INLINE void clear() {
    HINA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      HINA_UNROLL
      for (int t = 0; t < kTokens; ++t) acc[r][t] = _mm256_setzero_ps();
    }
  }
  HINA_INLINE void load(const __m256* parked) {
    HINA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      HINA_UNROLL
      for (int t = 0; t < kTokens; ++t) acc[r][t] = parked[r * kTokens + t];
    }
  }
  HINA_INLINE void store(__m256* parked) const {
    HINA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      HINA_UNROLL
      for (int t = 0; t < kTokens; ++t) parked[r * kTokens + t] = acc[r][t];
    }
  }

  // Adds the products of elements [from, to); only the last block of k may have a length that is no multiple of eight.
  template <DataType type>
  HINA_INLINE void add(const void* const* rows, const float* const* tokens, int64_t from, int64_t to) {
    const char* w[kRows];
    const float* x[kTokens];
    HINA_UNROLL
    for (int r = 0; r < kRows; ++r) w[r] = static_cast<const char*>(rows[r]);
    HINA_UNROLL
    for (int t = 0; t < kTokens; ++t) x[t] = tokens[t];
    int64_t i = from;
    for (; i + kLanes <= to; i += kLanes) {
      __m256 xv[kTokens];
      HINA_UNROLL
      for (int t = 0; t < kTokens; ++t) xv[t] = _mm256_loadu_ps(x[t] + i);
      HINA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const __m256 wv = widen<type>(w[r] + i * kSize<type>);
        HINA_UNROLL
        for (int t = 0; t < kTokens; ++t) acc[r][t] = _mm256_fmadd_ps(wv, xv[t], acc[r][t]);
      }
    }
    if (i == to) return;
    const int64_t left = to - i;
    __m256 xv[kTokens];
    HINA_UNROLL
    for (int t = 0; t < kTokens; ++t) xv[t] = _mm256_maskload_ps(x[t] + i, tail_mask(left));
    HINA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const __m256 wv = widen_tail<type>(w[r] + i * kSize<type>, left);
      HINA_UNROLL
      for (int t = 0; t < kTokens; ++t) acc[r][t] = _mm256_fmadd_ps(wv, xv[t], acc[r][t]);
    }
  }

  HINA_INLINE void finish(float* out, int64_t out_stride) const {
    HINA_UNROLL
    for (int t = 0; t < kTokens; ++t) reduce<kRows>(&acc[0][t], kTokens, out + t * out_stride);
  }
};

template <DataType type, int kRows, int kTokens>
HINA_INLINE void tile(const void* const* rows, const float* const* tokens, int64_t k, float* out, int64_t out_stride) {
  Tile<kRows, kTokens> t;
  t.clear();
  t.template add<type>(rows, tokens, 0, k);
  t.finish(out, out_stride);
}

// Triples of tokens against one group of rows, k in blocks: a block of the rows stays in the L1 cache for all triples
// (without, rows and tokens of 8 KiB each push one another out and every load comes from L2).
template <DataType type, int kRows>
HINA_INLINE void blocked_triples(const void* const* rows, const float* const* tokens, int n_triples, int64_t k,
                                 float* out, int64_t out_stride) {
  __m256 parked[kTriples][kRows * 3];
  for (int64_t from = 0; from < k; from += kBlock) {
    const int64_t to = from + kBlock < k ? from + kBlock : k;
    for (int i = 0; i < n_triples; ++i) {
      Tile<kRows, 3> t;
      if (from == 0)
        t.clear();
      else
        t.load(parked[i]);
      t.template add<type>(rows, tokens + 3 * i, from, to);
      if (to == k)
        t.finish(out + 3 * i * out_stride, out_stride);
      else
        t.store(parked[i]);
    }
  }
}

template <DataType type, int kRows>
HINA_INLINE void row_group(const void* const* rows, const float* const* tokens, int n_tokens, int64_t k, float* out,
                           int64_t out_stride) {
  int t = 0;
  while (n_tokens - t >= 3) {
    const int n = (n_tokens - t) / 3 < kTriples ? (n_tokens - t) / 3 : kTriples;
    blocked_triples<type, kRows>(rows, tokens + t, n, k, out + t * out_stride, out_stride);
    t += 3 * n;
  }
  if (n_tokens - t == 2) tile<type, kRows, 2>(rows, tokens + t, k, out + t * out_stride, out_stride);
  if (n_tokens - t == 1) tile<type, kRows, 1>(rows, tokens + t, k, out + t * out_stride, out_stride);
}

template <DataType type>
void dot(const void* const* rows, int n_rows, const float* const* tokens, int n_tokens, int64_t k, float* out,
         int64_t out_stride) {
  int r = 0;
  if (n_tokens == 1)
    for (; r + 8 <= n_rows; r += 8) tile<type, 8, 1>(rows + r, tokens, k, out + r, out_stride);
  for (; r + 4 <= n_rows; r += 4) row_group<type, 4>(rows + r, tokens, n_tokens, k, out + r, out_stride);
  for (; r < n_rows; ++r) row_group<type, 1>(rows + r, tokens, n_tokens, k, out + r, out_stride);
}

}  // namespace

const DotKernel kDotAvx2[kDataTypeCount] = {
    {"dot_f32_avx2", Isa::kAvx2, DataType::kFloat32, dot<DataType::kFloat32>},
    {"dot_f16_avx2", Isa::kAvx2, DataType::kFloat16, dot<DataType::kFloat16>},
    {"dot_bf16_avx2", Isa::kAvx2, DataType::kBFloat16, dot<DataType::kBFloat16>},
};

}  // namespace hina
