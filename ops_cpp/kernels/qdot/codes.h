// The codes of quantised weights and of tokens, one by one.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/convert/scalar.h"
#include "kernels/qdot/qdot.h"

namespace hina {
// Internal linkage in every includer, see convert/scalar.h.
namespace {

constexpr uint8_t kMxfp4Codes[16] = {HINA_MXFP4_CODES};

// Code number `index` of a row, as kernels see it (types.h).
template <WeightFormat format>
[[maybe_unused]] inline int code_of(const uint8_t* row, int64_t index) {
  if constexpr (format == WeightFormat::kUint8) return row[index];
  if constexpr (format == WeightFormat::kInt8) return row[index] ^ 0x80;
  const int nibble = (row[index / 2] >> (index % 2 * 4)) & 15;
  return format == WeightFormat::kMxfp4 ? kMxfp4Codes[nibble] : nibble;
}

struct TokenUnit {
  float scale, sum;
  int8_t codes[kUnit] = {};
};

// A unit of a token, of which there are n values, at any address.
[[maybe_unused]] inline TokenUnit quantise_unit(const float* x, int n) {
  const auto value = [&](int i) { return load<DataType::kFloat32>(x, i); };
  float amax = 0.0f;
  bool finite = true;
  for (int i = 0; i < n; ++i) {
    finite &= std::isfinite(value(i));
    amax = std::fmax(amax, std::fabs(value(i)));
  }
  const bool used = finite && amax >= 0x1p-100f;
  const float inverse = used ? 127.0f / amax : 0.0f;
  TokenUnit unit;
  int sum = 0;
  for (int i = 0; i < n && used; ++i) sum += unit.codes[i] = static_cast<int8_t>(std::nearbyint(value(i) * inverse));
  unit.scale = !finite ? std::numeric_limits<float>::quiet_NaN() : used ? amax / 127.0f : 0.0f;
  unit.sum = static_cast<float>(sum);
  return unit;
}

}  // namespace
}  // namespace hina
