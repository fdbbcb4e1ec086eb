// tile_int8, AMX with AVX-512 F, BW, VL, DQ. See vector.h and multiply.h.
//
// From 10 (bytes) and 16 tokens on it is faster than qdot with rows in the L2 cache, but not in whole layers, whose
// rows come from memory: int4 with 16 tokens of an expert took 1.2 times as long, with 64 as long or 0.8 times
// (2026-11-30, two threads of an Emerald Rapids VM, in turns).
#include "kernels/simd/avx512.h"
// The vocabulary comes first.
#include "kernels/tables.h"
#include "kernels/tile_int8/vector.h"

namespace hina {
const TileKernel kTileInt8Avx512[kQuantisedFormats] = {
    entry<WeightFormat::kUint8>("tile_uint8_avx512", Isa::kAvx512, 32),
    entry<WeightFormat::kInt8>("tile_int8_avx512", Isa::kAvx512, 32),
    entry<WeightFormat::kInt4>("tile_int4_avx512", Isa::kAvx512, 48),
    entry<WeightFormat::kMxfp4>("tile_mxfp4_avx512", Isa::kAvx512, 48),
};
}  // namespace hina
