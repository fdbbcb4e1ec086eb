// route, AVX2 + FMA + F16C. See vector.h.
#include "kernels/simd/avx2.h"
// The vocabulary comes first.
#include "kernels/route/vector.h"
#include "kernels/tables.h"

namespace hina {
const RouteKernel kRouteAvx2[1] = {{"route_avx2", Isa::kAvx2, softmax, sigmoid, top_k}};
}  // namespace hina
