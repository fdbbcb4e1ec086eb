// convert, AVX2 + F16C: eight elements a step; the last, partial step goes through a zeroed buffer on the stack.
#include <immintrin.h>

#include <cstring>

#include "kernels/tables.h"

namespace hina {
namespace {

constexpr int kLanes = 8;

template <DataType type>
inline __m256 widen8(const void* source) {
  if constexpr (type == DataType::kFloat32) return _mm256_loadu_ps(static_cast<const float*>(source));
  const __m128i raw = _mm_loadu_si128(static_cast<const __m128i*>(source));
  if constexpr (type == DataType::kFloat16) return _mm256_cvtph_ps(raw);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

template <DataType type>
inline void narrow8(__m256 value, void* target) {
  if constexpr (type == DataType::kFloat32) {
    _mm256_storeu_ps(static_cast<float*>(target), value);
  } else if constexpr (type == DataType::kFloat16) {
    _mm_storeu_si128(static_cast<__m128i*>(target), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  } else {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(target), _mm256_castsi256_si128(packed));
  }
}

template <DataType type>
void widen(const void* source, float* target, int64_t n) {
  constexpr int kSize = type == DataType::kFloat32 ? 4 : 2;
  const char* from = static_cast<const char*>(source);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) _mm256_storeu_ps(target + i, widen8<type>(from + i * kSize));
  if (i < n) {
    alignas(32) char part[kLanes * 4] = {};
    alignas(32) float wide[kLanes];
    std::memcpy(part, from + i * kSize, static_cast<size_t>(n - i) * kSize);
    _mm256_store_ps(wide, widen8<type>(part));
    std::memcpy(target + i, wide, static_cast<size_t>(n - i) * 4);
  }
}

template <DataType type>
void narrow(const float* source, void* target, int64_t n) {
  constexpr int kSize = type == DataType::kFloat32 ? 4 : 2;
  char* to = static_cast<char*>(target);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) narrow8<type>(_mm256_loadu_ps(source + i), to + i * kSize);
  if (i < n) {
    alignas(32) float part[kLanes] = {};
    alignas(32) char narrowed[kLanes * 4];
    std::memcpy(part, source + i, static_cast<size_t>(n - i) * 4);
    narrow8<type>(_mm256_load_ps(part), narrowed);
    std::memcpy(to + i * kSize, narrowed, static_cast<size_t>(n - i) * kSize);
  }
}

}  // namespace

const ConvertKernel kConvertAvx2[kDataTypeCount] = {
    {"convert_f32_avx2", Isa::kAvx2, DataType::kFloat32, widen<DataType::kFloat32>, narrow<DataType::kFloat32>},
    {"convert_f16_avx2", Isa::kAvx2, DataType::kFloat16, widen<DataType::kFloat16>, narrow<DataType::kFloat16>},
    {"convert_bf16_avx2", Isa::kAvx2, DataType::kBFloat16, widen<DataType::kBFloat16>, narrow<DataType::kBFloat16>},
};

}  // namespace hina
