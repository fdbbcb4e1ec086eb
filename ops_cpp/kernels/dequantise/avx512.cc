// dequantise, AVX-512 F, BW, VL, DQ. See vector.h.
#include "kernels/simd/avx512.h"
// The vocabulary comes first.
#include "kernels/dequantise/vector.h"
#include "kernels/tables.h"

namespace hina {
const DequantiseKernel kDequantiseAvx512[kQuantisedFormats] = {
    {"dequantise_uint8_avx512", Isa::kAvx512, WeightFormat::kUint8, dequantise<Bytes<WeightFormat::kUint8>>},
    {"dequantise_int8_avx512", Isa::kAvx512, WeightFormat::kInt8, dequantise<Bytes<WeightFormat::kInt8>>},
    {"dequantise_int4_avx512", Isa::kAvx512, WeightFormat::kInt4, dequantise<Nibbles<WeightFormat::kInt4>>},
    {"dequantise_mxfp4_avx512", Isa::kAvx512, WeightFormat::kMxfp4, dequantise<Nibbles<WeightFormat::kMxfp4>>},
};
}  // namespace hina
