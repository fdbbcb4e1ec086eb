// activation, AVX-512 F, BW, VL, DQ. See vector.h.
#include "kernels/simd/avx512.h"
// The vocabulary comes first.
#include "kernels/activation/vector.h"
#include "kernels/tables.h"

namespace hina {
const ActivationKernel kActivationAvx512[kVectorActivations] = {
    {"silu_avx512", Isa::kAvx512, Activation::kSilu, apply<Activation::kSilu>},
    {"gelu_tanh_avx512", Isa::kAvx512, Activation::kGeluTanh, apply<Activation::kGeluTanh>},
};
}  // namespace hina
