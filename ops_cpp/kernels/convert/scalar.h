// Scalar conversions between float32 and the types of tensors, by their bits; safe at any alignment.
// float16 is IEEE 754 binary16, bfloat16 the upper half of binary32; both round to nearest, ties to even.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/types.h"

namespace hina {
// Internal linkage in every includer: a translation unit built for a newer ISA must not lend its copy to others.
namespace {

[[maybe_unused]] inline float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24, exact in float32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

[[maybe_unused]] inline uint16_t half_of_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN, quiet
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds beyond 65504
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

[[maybe_unused]] inline float float_of_bfloat(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

[[maybe_unused]] inline uint16_t bfloat_of_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN, quiet
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

[[maybe_unused]] inline float float_of_e8m0(uint8_t e) {
  if (e == 0xff) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(e == 0 ? 0x400000u : static_cast<uint32_t>(e) << 23);  // 2^-127 is subnormal
}

template <DataType type>
[[maybe_unused]] inline float load(const void* base, int64_t index) {
  if constexpr (type == DataType::kFloat32) {
    float value;
    std::memcpy(&value, static_cast<const char*>(base) + index * 4, 4);
    return value;
  } else if constexpr (type == DataType::kUint8 || type == DataType::kInt8 || type == DataType::kE8M0) {
    const uint8_t value = static_cast<const uint8_t*>(base)[index];
    if constexpr (type == DataType::kE8M0) return float_of_e8m0(value);
    return type == DataType::kUint8 ? value : static_cast<int8_t>(value);
  } else if constexpr (type == DataType::kUint4) {
    return static_cast<float>((static_cast<const uint8_t*>(base)[index / 2] >> (index % 2 * 4)) & 15);
  } else {
    uint16_t value;
    std::memcpy(&value, static_cast<const char*>(base) + index * 2, 2);
    return type == DataType::kFloat16 ? float_of_half(value) : float_of_bfloat(value);
  }
}

template <DataType type>
[[maybe_unused]] inline void store(void* base, int64_t index, float value) {
  if constexpr (type == DataType::kFloat32) {
    std::memcpy(static_cast<char*>(base) + index * 4, &value, 4);
  } else {
    const uint16_t bits = type == DataType::kFloat16 ? half_of_float(value) : bfloat_of_float(value);
    std::memcpy(static_cast<char*>(base) + index * 2, &bits, 2);
  }
}

}  // namespace
}  // namespace hina
