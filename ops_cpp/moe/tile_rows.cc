#include "moe/tile_rows.h"

#include <algorithm>

#include "moe/blocking.h"
#include "moe/factors.h"

namespace hina {
namespace {

// The kernel for one matrix, or nullptr.
const TileKernel* kernel_of(const Matrix& matrix, const Params& params, const KernelSet& kernels, DataType type) {
  const TileKernel* kernel = nullptr;
  const TileKernel* bf16 = &kernels.tile_bf16[type == DataType::kBFloat16 ? 0 : 1];
  if (!matrix.quantised())
    kernel = matrix.type == DataType::kBFloat16 ? bf16 : nullptr;
  else if (params.int8_activations)
    kernel = unit_of(matrix) == kUnit ? &kernels.tile_int8[static_cast<int>(matrix.format)] : nullptr;
  else
    kernel = matrix.format == WeightFormat::kMxfp4 || kernels.tiles_round_weights ? bf16 : nullptr;
  return kernel == nullptr || kernel->name == nullptr ? nullptr : kernel;
}

bool is_bf16(const TileKernel& kernel) { return kernel.terms > 0; }

// From how many tokens on an expert is multiplied in tiles. Where one of its kernels is of bfloat16, whose results are
// not those of vectors, the other has no say: a token's bits shall depend on its batch as little as possible.
int from_tokens(const TileKernel& one, const TileKernel& other) {
  if (is_bf16(one) != is_bf16(other)) return (is_bf16(one) ? one : other).from_tokens;
  return std::max(one.from_tokens, other.from_tokens);
}

// From row to row, in bytes, of k codes that `unpack` makes.
int64_t unpacked_stride(int64_t k) { return ceil_div(k, kUnit) * kUnit; }

}  // namespace

ExpertTiles expert_tiles(const Expert& expert, bool gated, const Params& params, const KernelSet& kernels,
                         DataType type, int64_t tokens) {
  const ExpertTiles tiles{kernel_of(expert.up, params, kernels, type), kernel_of(expert.down, params, kernels, type)};
  if (tiles.first == nullptr || tiles.down == nullptr) return {};
  if (gated && kernel_of(expert.gate, params, kernels, type) != tiles.first) return {};
  return tokens >= from_tokens(*tiles.first, *tiles.down) ? tiles : ExpertTiles{};
}

int64_t tile_rows_at_once(const TileKernel& kernel, int64_t tokens, int parts) {
  // A pair of panels meets the rows while they come from memory, which is the faster the longer the streams are that
  // they are read in (kernels/tile_bf16/multiply.h).
  if (is_bf16(kernel) && tokens <= 2 * kPanelTokens) return kMostTileRows;
  return kTileFloats / kTileChunk / parts;
}

int64_t tile_scratch_bytes(const Matrix& matrix, const TileKernel& kernel, int64_t rows, int64_t k) {
  if (!matrix.quantised()) return 0;
  const int64_t factors = factors_bytes(rows, k, unit_of(matrix));
  if (is_bf16(kernel)) return factors + aligned(k * 4) + aligned(rows * k * 2);
  return factors + (kernel.unpack == nullptr ? 0 : aligned(rows * unpacked_stride(k)));
}

TileRows tile_rows(const RowBlock& block, const TileKernel& kernel, int64_t k, const KernelSet& kernels,
                   std::byte* scratch) {
  const Matrix& matrix = *block.matrix;
  const int n = static_cast<int>(block.last - block.first);
  TileRows rows{matrix.row(block.first), matrix.row_stride, n};
  if (!matrix.quantised()) return rows;
  const Factors factors = expand_factors(block, k, kernels, scratch);
  scratch += factors_bytes(n, k, unit_of(matrix));
  if (is_bf16(kernel)) {
    auto* wide = reinterpret_cast<float*>(scratch);
    scratch += aligned(k * 4);
    for (int r = 0; r < n; ++r) {
      kernels.dequantise[static_cast<int>(matrix.format)](matrix.row(block.first + r), k, unit_of(matrix),
                                                          factors.scales_of(r), factors.zero_points_of(r), wide);
      kernels.narrow[static_cast<int>(DataType::kBFloat16)](wide, scratch + r * k * 2, k);
    }
    return {scratch, k * 2, n};
  }
  const bool centred = matrix.zero_points == nullptr;
  rows.scales = factors.scales;
  rows.zero_points = centred ? nullptr : factors.zero_points;
  if (kernel.unpack == nullptr) return rows;
  const void* packed[kMostTileRows];
  for (int r = 0; r < n; ++r) packed[r] = matrix.row(block.first + r);
  kernel.unpack(packed, n, matrix.row_bytes, k, centred, scratch, unpacked_stride(k));
  rows.first = scratch, rows.stride = unpacked_stride(k);
  return rows;
}

}  // namespace hina
