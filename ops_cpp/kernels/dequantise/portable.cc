// dequantise, portable C++: the reference of the family.
#include "kernels/qdot/codes.h"
#include "kernels/tables.h"

namespace hina {
namespace {

template <WeightFormat format>
void dequantise(const void* values, int64_t k, int unit, const float* scales, const float* zero_points, float* out) {
  const auto* row = static_cast<const uint8_t*>(values);
  for (int64_t i = 0; i < k; ++i)
    out[i] = (static_cast<float>(code_of<format>(row, i)) - zero_points[i / unit]) * scales[i / unit];
}

template <WeightFormat format>
constexpr DequantiseKernel entry(const char* name) {
  return {name, Isa::kPortable, format, dequantise<format>};
}

}  // namespace

const DequantiseKernel kDequantisePortable[kQuantisedFormats] = {
    entry<WeightFormat::kUint8>("dequantise_uint8_portable"),
    entry<WeightFormat::kInt8>("dequantise_int8_portable"),
    entry<WeightFormat::kInt4>("dequantise_int4_portable"),
    entry<WeightFormat::kMxfp4>("dequantise_mxfp4_portable"),
};

}  // namespace hina
