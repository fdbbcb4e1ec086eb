// tile_bf16, AMX with AVX2. See vector.h.
#include "kernels/simd/avx2.h"
// The vocabulary comes first.
#include "kernels/tables.h"
#include "kernels/tile_bf16/vector.h"

namespace hina {
const TileKernel kTileBf16Avx2[kTileTerms] = {
    entry<1>("tile_bf16_avx2", Isa::kAvx2),
    entry<2>("tile_bf16x2_avx2", Isa::kAvx2),
};
}  // namespace hina
