// Which experts are multiplied in tiles (kernels/tile), and their rows as those kernels read them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dispatch.h"
#include "moe/params.h"
#include "moe/projection.h"

namespace hina {

// The kernels of an expert's two projections; both nullptr where it is multiplied by vectors.
struct ExpertTiles {
  const TileKernel* first = nullptr;
  const TileKernel* down = nullptr;
};

// For `tokens` tokens of a call of `type`. gate and up take the same tokens, so that they want the same kernel.
//
//   accuracy_level 4       the int8 kernel of the format: the bits that qdot gives
//   bfloat16 weights       one term where activations are bfloat16, else two, which keep the accuracy of float32
//   MXFP4                  likewise, dequantised to bfloat16, which is exact
//   other codes            likewise, only if the kernel set allows weights to be rounded to bfloat16
ExpertTiles expert_tiles(const Expert& expert, bool gated, const Params& params, const KernelSet& kernels,
                         DataType type, int64_t tokens);

constexpr int kMostTileRows = 128;

// Rows of each of `parts` blocks, which are multiplied together, for `tokens` tokens of an expert: at most
// kMostTileRows.
int64_t tile_rows_at_once(const TileKernel& kernel, int64_t tokens, int parts);

// Bytes of scratch memory, a multiple of 64, for up to `rows` rows of `k` values.
int64_t tile_scratch_bytes(const Matrix& matrix, const TileKernel& kernel, int64_t rows, int64_t k);

// The rows of a block as `kernel` reads them: where they lie, or prepared in `scratch`, which is 64-byte aligned.
TileRows tile_rows(const RowBlock& block, const TileKernel& kernel, int64_t k, const KernelSet& kernels,
                   std::byte* scratch);

}  // namespace hina
