// convert, AVX2 + FMA + F16C. See vector.h.
#include "kernels/simd/avx2.h"
// The vocabulary comes first.
#include "kernels/convert/vector.h"
#include "kernels/tables.h"

namespace hina {
const ConvertKernel kConvertAvx2[kDataTypeCount] = {
    {"convert_f32_avx2", Isa::kAvx2, DataType::kFloat32, widen<DataType::kFloat32>, narrow<DataType::kFloat32>},
    {"convert_f16_avx2", Isa::kAvx2, DataType::kFloat16, widen<DataType::kFloat16>, narrow<DataType::kFloat16>},
    {"convert_bf16_avx2", Isa::kAvx2, DataType::kBFloat16, widen<DataType::kBFloat16>, narrow<DataType::kBFloat16>},
    {"convert_uint8_avx2", Isa::kAvx2, DataType::kUint8, widen<DataType::kUint8>, nullptr},
    {"convert_int8_avx2", Isa::kAvx2, DataType::kInt8, widen<DataType::kInt8>, nullptr},
    {"convert_uint4_avx2", Isa::kAvx2, DataType::kUint4, widen<DataType::kUint4>, nullptr},
    {"convert_e8m0_avx2", Isa::kAvx2, DataType::kE8M0, widen<DataType::kE8M0>, nullptr},
};
}  // namespace hina
