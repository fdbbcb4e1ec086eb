// The codes of quantised weights, one by one.
#pragma once

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

}  // namespace
}  // namespace hina
