// dequantise, AVX2 + FMA + F16C. See vector.h.
#include "kernels/simd/avx2.h"
// The vocabulary comes first.
#include "kernels/dequantise/vector.h"
#include "kernels/tables.h"

namespace hina {
const DequantiseKernel kDequantiseAvx2[kQuantisedFormats] = {
    {"dequantise_uint8_avx2", Isa::kAvx2, WeightFormat::kUint8, dequantise<Bytes<WeightFormat::kUint8>>},
    {"dequantise_int8_avx2", Isa::kAvx2, WeightFormat::kInt8, dequantise<Bytes<WeightFormat::kInt8>>},
    {"dequantise_int4_avx2", Isa::kAvx2, WeightFormat::kInt4, dequantise<Nibbles<WeightFormat::kInt4>>},
    {"dequantise_mxfp4_avx2", Isa::kAvx2, WeightFormat::kMxfp4, dequantise<Nibbles<WeightFormat::kMxfp4>>},
};
}  // namespace hina
