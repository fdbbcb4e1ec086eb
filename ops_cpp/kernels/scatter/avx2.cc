// scatter, AVX2 + FMA + F16C. See vector.h.
#include "kernels/simd/avx2.h"
// The vocabulary comes first.
#include "kernels/scatter/vector.h"
#include "kernels/tables.h"

namespace hina {
const ScatterKernel kScatterAvx2[1] = {{"scatter_avx2", Isa::kAvx2, scatter}};
}  // namespace hina
