// tile_int8, AMX with AVX-512 F, BW, VL, DQ. See vector.h and multiply.h. From 10 and
// 16 tokens on it is faster than qdot with rows in the L2 cache; with rows from memory about as fast there.
#include "kernels/simd/avx512.h"
// The vocabulary comes first.
#include "kernels/tables.h"
#include "kernels/tile_int8/vector.h"

namespace hina {
const TileKernel kTileInt8Avx512[kQuantisedFormats] = {
    entry<WeightFormat::kUint8>("tile_uint8_avx512", Isa::kAvx512, 10),
    entry<WeightFormat::kInt8>("tile_int8_avx512", Isa::kAvx512, 10),
    entry<WeightFormat::kInt4>("tile_int4_avx512", Isa::kAvx512, 16),
    entry<WeightFormat::kMxfp4>("tile_mxfp4_avx512", Isa::kAvx512, 16),
};
}  // namespace hina
