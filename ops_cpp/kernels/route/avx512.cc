// route, AVX-512 F, BW, VL, DQ. See vector.h.
#include "kernels/simd/avx512.h"
// The vocabulary comes first.
#include "kernels/route/vector.h"
#include "kernels/tables.h"

namespace hina {
const RouteKernel kRouteAvx512[1] = {{"route_avx512", Isa::kAvx512, softmax, sigmoid, top_k}};
}  // namespace hina
