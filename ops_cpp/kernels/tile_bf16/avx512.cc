// tile_bf16, AMX with AVX-512 F, BW, VL, DQ. See vector.h.
#include "kernels/simd/avx512.h"
// The vocabulary comes first.
#include "kernels/tables.h"
#include "kernels/tile_bf16/vector.h"

namespace hina {
const TileKernel kTileBf16Avx512[kTileTerms] = {
    entry<1>("tile_bf16_avx512", Isa::kAvx512),
    entry<2>("tile_bf16x2_avx512", Isa::kAvx512),
};
}  // namespace hina
