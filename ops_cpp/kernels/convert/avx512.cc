// convert, AVX-512 F, BW, VL, DQ. See vector.h.
#include "kernels/simd/avx512.h"
// The vocabulary comes first.
#include "kernels/convert/vector.h"
#include "kernels/tables.h"

namespace hina {
const ConvertKernel kConvertAvx512[kDataTypeCount] = {
    {"convert_f32_avx512", Isa::kAvx512, DataType::kFloat32, widen<DataType::kFloat32>, narrow<DataType::kFloat32>},
    {"convert_f16_avx512", Isa::kAvx512, DataType::kFloat16, widen<DataType::kFloat16>, narrow<DataType::kFloat16>},
    {"convert_bf16_avx512", Isa::kAvx512, DataType::kBFloat16, widen<DataType::kBFloat16>, narrow<DataType::kBFloat16>},
    {"convert_uint8_avx512", Isa::kAvx512, DataType::kUint8, widen<DataType::kUint8>, nullptr},
    {"convert_int8_avx512", Isa::kAvx512, DataType::kInt8, widen<DataType::kInt8>, nullptr},
    {"convert_uint4_avx512", Isa::kAvx512, DataType::kUint4, widen<DataType::kUint4>, nullptr},
    {"convert_e8m0_avx512", Isa::kAvx512, DataType::kE8M0, widen<DataType::kE8M0>, nullptr},
};
}  // namespace hina
