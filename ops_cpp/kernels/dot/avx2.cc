// dot, AVX2 + FMA + F16C. Tiles, tails and figures: vector.h.
#include "kernels/simd/avx2.h"
// The vocabulary comes first.
#include "kernels/dot/vector.h"
#include "kernels/tables.h"

namespace hina {
const DotKernel kDotAvx2[kFloatTypeCount] = {
    {"dot_f32_avx2", Isa::kAvx2, DataType::kFloat32, DataType::kFloat32, dot<Widened<DataType::kFloat32>>},
    {"dot_f16_avx2", Isa::kAvx2, DataType::kFloat16, DataType::kFloat32, dot<Widened<DataType::kFloat16>>},
    {"dot_bf16_avx2", Isa::kAvx2, DataType::kBFloat16, DataType::kFloat32, dot<Widened<DataType::kBFloat16>>},
};
}  // namespace hina
