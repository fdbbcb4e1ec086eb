// activation, AVX2 + FMA + F16C. See vector.h.
#include "kernels/simd/avx2.h"
// The vocabulary comes first.
#include "kernels/activation/vector.h"
#include "kernels/tables.h"

namespace hina {
const ActivationKernel kActivationAvx2[kVectorActivations] = {
    {"silu_avx2", Isa::kAvx2, Activation::kSilu, apply<Activation::kSilu>},
    {"gelu_tanh_avx2", Isa::kAvx2, Activation::kGeluTanh, apply<Activation::kGeluTanh>},
};
}  // namespace hina
