// What one MoE layer is, for the algorithm: sizes, rules and pointers into weights that somebody else owns.
// Names and meanings follow graph_passes/op_schema.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/activation/activation.h"
#include "kernels/types.h"

namespace hina {

// `rows` x `cols`, each row contiguous, rows `row_stride` bytes apart; read where it lies, at any alignment. Quantised
// when `format` is not kFloat: then each row also has scales, and may have zero points, one for each `block` of values.
struct Matrix {
  const std::byte* data = nullptr;
  int64_t row_stride = 0;
  DataType type = DataType::kFloat32;  // of plain weights

  WeightFormat format = WeightFormat::kFloat;
  int64_t row_bytes = 0;              // of a row of codes, padding of its last block included
  int64_t block = 0;                  // 16, 32, 64, 128 or 256 values; 0: the whole row
  const std::byte* scales = nullptr;  // [rows, blocks]
  int64_t scale_stride = 0;           // bytes from row to row
  DataType scale_type = DataType::kFloat32;
  const std::byte* zero_points = nullptr;  // [rows, blocks], kUint4 rows padded to a byte; nullptr: the middle code
  int64_t zero_point_stride = 0;
  DataType zero_point_type = DataType::kUint8;

  const std::byte* row(int64_t index) const { return data + index * row_stride; }
  bool quantised() const { return format != WeightFormat::kFloat; }
  // Of a value.
  int64_t bits() const {
    if (!quantised()) return type == DataType::kFloat32 ? 32 : 16;
    return format == WeightFormat::kInt4 || format == WeightFormat::kMxfp4 ? 4 : 8;
  }
};

// Rows of a matrix, last - first of them: from `first` on; or, where `run` is not 0, runs of so many rows, each `step`
// rows behind the one before.
struct RowBlock {
  const Matrix* matrix = nullptr;
  int64_t first = 0;
  int64_t last = 0;
  int64_t run = 0;
  int64_t step = 0;

  // Of the i-th row.
  int64_t index(int64_t i) const { return run == 0 ? first + i : first + i / run * step + i % run; }
};

// One MLP: down(act(gate x) * up x), or down(act(up x)) when `gated` is false. Biases are float32, empty if absent.
// `gate_up` has the rows of gate and up in turns, one of each, where they lie so; else its data is nullptr.
struct Expert {
  Matrix gate, up, down, gate_up;
  std::vector<float> gate_bias, up_bias, down_bias;
};

enum class RouterInput { kWeight, kLogits, kTopK };
enum class ScoreFunc { kSoftmax, kSigmoid, kSoftmaxTopK, kSigmoidTopK, kSparsemixer };
enum class GroupScore { kMax, kTop2Sum };

struct Router {
  RouterInput input = RouterInput::kWeight;
  Matrix weight;                  // [E, H], for RouterInput::kWeight
  std::vector<float> bias;        // [E] or empty
  std::vector<float> correction;  // [E] or empty: e_score_correction_bias
  ScoreFunc score_func = ScoreFunc::kSoftmax;
  int64_t n_group = 1;
  int64_t topk_group = 1;
  GroupScore group_score = GroupScore::kMax;
  float group_mask_value = -std::numeric_limits<float>::infinity();
  bool mix_from_selection = false;
  bool norm_topk_prob = false;
  float norm_p = 1.0f;
  float norm_eps = 0.0f;
  float norm_floor = 0.0f;
  float routed_scaling_factor = 1.0f;
  float sparsemixer_jitter_eps = 0.01f;
  bool ties_to_highest = false;
  bool zero_nonfinite = false;
};

struct Params {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  bool gated = true;
  bool weights_on_input = false;  // apply_weights_to = "input"
  bool int8_activations = false;  // accuracy_level = 4: tokens of quantised projections are quantised too
  Activation activation = Activation::kSilu;
  ActivationParams activation_params{1.0f, 0.0f, std::numeric_limits<float>::infinity()};
  Router router;
  std::vector<Expert> experts;  // [E]

  int64_t shared_intermediate_size = 0;  // 0: no shared expert
  bool shared_gated = true;
  Expert shared;
  Matrix shared_gate;  // [1, H]; data == nullptr: the shared output is not gated
};

}  // namespace hina
