// tile_int8, AMX with AVX2, FMA, F16C. See vector.h. For machines and
// emulators without AVX-512: the thresholds are those of avx512.cc.
#include "kernels/simd/avx2.h"
// The vocabulary comes first.
#include "kernels/tables.h"
#include "kernels/tile_int8/vector.h"

namespace hina {
const TileKernel kTileInt8Avx2[kQuantisedFormats] = {
    entry<WeightFormat::kUint8>("tile_uint8_avx2", Isa::kAvx2, 10),
    entry<WeightFormat::kInt8>("tile_int8_avx2", Isa::kAvx2, 10),
    entry<WeightFormat::kInt4>("tile_int4_avx2", Isa::kAvx2, 16),
    entry<WeightFormat::kMxfp4>("tile_mxfp4_avx2", Isa::kAvx2, 16),
};
}  // namespace hina
