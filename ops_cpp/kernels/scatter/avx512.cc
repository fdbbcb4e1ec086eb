// scatter, AVX-512 F, BW, VL, DQ. See vector.h.
#include "kernels/simd/avx512.h"
// The vocabulary comes first.
#include "kernels/scatter/vector.h"
#include "kernels/tables.h"

namespace hina {
const ScatterKernel kScatterAvx512[1] = {{"scatter_avx512", Isa::kAvx512, scatter}};
}  // namespace hina
