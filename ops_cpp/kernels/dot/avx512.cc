// dot, AVX-512 F, BW, VL, DQ. Tiles, tails and figures: vector.h.
#include "kernels/simd/avx512.h"
// The vocabulary comes first.
#include "kernels/dot/vector.h"
#include "kernels/tables.h"

namespace hina {
const DotKernel kDotAvx512[kFloatTypeCount] = {
    {"dot_f32_avx512", Isa::kAvx512, DataType::kFloat32, DataType::kFloat32, dot<Widened<DataType::kFloat32>>},
    {"dot_f16_avx512", Isa::kAvx512, DataType::kFloat16, DataType::kFloat32, dot<Widened<DataType::kFloat16>>},
    {"dot_bf16_avx512", Isa::kAvx512, DataType::kBFloat16, DataType::kFloat32, dot<Widened<DataType::kBFloat16>>},
};
}  // namespace hina
