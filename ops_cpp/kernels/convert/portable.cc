// convert, portable C++: the reference of the family.
#include "kernels/convert/scalar.h"
#include "kernels/tables.h"

namespace hina {
namespace {

template <DataType type>
void widen(const void* source, float* target, int64_t n) {
  for (int64_t i = 0; i < n; ++i) target[i] = load<type>(source, i);
}

template <DataType type>
void narrow(const float* source, void* target, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store<type>(target, i, source[i]);
}

template <DataType type>
constexpr ConvertKernel entry(const char* name) {
  if constexpr (static_cast<int>(type) < kFloatTypeCount)
    return {name, Isa::kPortable, type, widen<type>, narrow<type>};
  else
    return {name, Isa::kPortable, type, widen<type>, nullptr};
}

}  // namespace

const ConvertKernel kConvertPortable[kDataTypeCount] = {
    entry<DataType::kFloat32>("convert_f32_portable"),   entry<DataType::kFloat16>("convert_f16_portable"),
    entry<DataType::kBFloat16>("convert_bf16_portable"), entry<DataType::kUint8>("convert_uint8_portable"),
    entry<DataType::kInt8>("convert_int8_portable"),     entry<DataType::kUint4>("convert_uint4_portable"),
    entry<DataType::kE8M0>("convert_e8m0_portable"),
};

}  // namespace hina
