#include "numa/blocks.h"

namespace hina {
namespace {

std::span<const std::byte> rows_at(const std::byte* data, int64_t rows, int64_t stride, int64_t row_bytes) {
  if (data == nullptr || rows == 0) return {};
  return {data, static_cast<size_t>((rows - 1) * stride + row_bytes)};
}

// Of `count` values.
int64_t bytes_of(DataType type, int64_t count) {
  switch (type) {
    case DataType::kFloat32:
      return count * 4;
    case DataType::kFloat16:
    case DataType::kBFloat16:
      return count * 2;
    case DataType::kUint4:
      return (count + 1) / 2;
    default:
      return count;
  }
}

int64_t blocks_in_row(const Block& block) {
  return block.matrix->block == 0 ? 1 : (block.k + block.matrix->block - 1) / block.matrix->block;
}

}  // namespace

std::span<const std::byte> Block::data() const {
  return rows_at(matrix->data, rows, matrix->row_stride,
                 matrix->quantised() ? matrix->row_bytes : bytes_of(matrix->type, k));
}

std::span<const std::byte> Block::scales() const {
  return rows_at(matrix->scales, rows, matrix->scale_stride, bytes_of(matrix->scale_type, blocks_in_row(*this)));
}

std::span<const std::byte> Block::zero_points() const {
  return rows_at(matrix->zero_points, rows, matrix->zero_point_stride,
                 bytes_of(matrix->zero_point_type, blocks_in_row(*this)));
}

int64_t expert_count(const Params& params) { return params.num_experts + (params.shared_intermediate_size > 0); }

const Expert& expert_at(const Params& params, int64_t index) {
  return index == params.num_experts ? params.shared : params.experts[static_cast<size_t>(index)];
}

ExpertBlocks blocks_of(const Params& params, int64_t index) {
  const bool shared = index == params.num_experts;
  const Expert& expert = expert_at(params, index);
  const int64_t hidden = params.hidden_size, size = shared ? params.shared_intermediate_size : params.intermediate_size;
  ExpertBlocks blocks{{}, {&expert.down, hidden, size}};
  if (expert.gate_up.data != nullptr) {
    blocks.first = {{&expert.gate_up, 2 * size, hidden}};
  } else {
    if (shared ? params.shared_gated : params.gated) blocks.first.push_back({&expert.gate, size, hidden});
    blocks.first.push_back({&expert.up, size, hidden});
  }
  return blocks;
}

}  // namespace hina
