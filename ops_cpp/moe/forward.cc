// How the work is cut. Every task is claimed by one fetch_add, in this order:
//
//   prepare  a block of tokens: activations to float32, router logits; whoever finishes the last logits of a block
//            chooses its experts, and whoever finishes the last block makes the plan. When the tokens make only one
//            block, the tasks of a router inside the op are blocks of its rows instead.
//   FC1      (group, block of rows): gate and up rows of one expert for all its tokens, then the activation
//   FC2      a block of output rows, for ALL groups in ascending order: down rows times what FC1 left, weighted,
//            added to the output. One task owns an output element: nothing is atomic, the order of the sum is fixed.
//
// An FC2 task waits for the FC1 countdown of a group just before it needs it; all FC1 tasks are claimed by then (see
// Countdown). Kernels see all rows of a block against a chunk of tokens that stays in the L2 cache.
#include "moe/forward.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>

#include "moe/blocking.h"
#include "moe/routing.h"
#include "moe/workspace.h"

namespace hina {
namespace {

int64_t size_of(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

// One block of rows as a kernel takes them.
struct RowBlock {
  const void* rows[kRows];
  int count;
  DotFn dot;
};

class Layer {
 public:
  Layer(const Params& params, const KernelSet& kernels, const Call& call, const Workspace& workspace)
      : p_(params), kernels_(kernels), call_(call), w_(workspace) {
    x_ = call.type == DataType::kFloat32 ? static_cast<const float*>(call.hidden_states) : w_.x;
    sum_ = call.type == DataType::kFloat32 ? static_cast<float*>(call.output) : w_.sum;
    token_blocks_ = ceil_div(call.tokens, kTokenBlock);
    router_rows_ = p_.router.input == RouterInput::kWeight && token_blocks_ == 1 ? ceil_div(p_.num_experts, kRows) : 1;
    prepare_tasks_ = token_blocks_ * router_rows_;
    for (int64_t b = 0; b < token_blocks_; ++b)
      (new (&w_.logits_left[b]) Countdown)->reset(static_cast<int32_t>(router_rows_));
    for (int64_t g = 0; g <= p_.num_experts; ++g) new (&w_.fc1_left[g]) Countdown;
    blocks_left_.reset(static_cast<int32_t>(token_blocks_));
    unplanned_.reset(1);
    fc1_blocks_ = ceil_div(p_.intermediate_size, fc1_rows(p_.gated));
    shared_fc1_blocks_ = ceil_div(p_.shared_intermediate_size, fc1_rows(p_.shared_gated));
    fc2_tasks_ = ceil_div(p_.hidden_size, kRows);
    if (router_rows_ > 1) widen_tokens(0, call_.tokens);
  }

  void work(size_t worker) {
    for (int64_t task; (task = next_prepare_.fetch_add(1, std::memory_order_relaxed)) < prepare_tasks_;)
      prepare(task, worker);
    unplanned_.wait();
    if (bad_id_ >= 0) return;
    for (int64_t task; (task = next_fc1_.fetch_add(1, std::memory_order_relaxed)) < fc1_tasks_;) fc1(task, worker);
    for (int64_t task; (task = next_fc2_.fetch_add(1, std::memory_order_relaxed)) < fc2_tasks_;) fc2(task, worker);
  }

  // Empty, or what is wrong with topk_ids; this piece begins at the token `begin` of the call.
  std::string error(int64_t begin) const {
    if (bad_id_ < 0) return {};
    return "topk_ids holds " + std::to_string(raw_id(bad_id_)) + " at position " +
           std::to_string(begin * p_.top_k + bad_id_) + ", expected 0.." + std::to_string(p_.num_experts - 1);
  }

 private:
  int64_t raw_id(int64_t index) const {
    const auto* ids = static_cast<const std::byte*>(call_.topk_ids);
    int64_t wide;
    int32_t narrow;
    if (call_.topk_ids_are_int64)
      std::memcpy(&wide, ids + index * 8, 8);
    else
      std::memcpy(&narrow, ids + index * 4, 4);
    return call_.topk_ids_are_int64 ? wide : narrow;
  }

  // --- prepare ---

  void widen_tokens(int64_t begin, int64_t end) {
    if (call_.type == DataType::kFloat32) return;
    const auto* source = static_cast<const std::byte*>(call_.hidden_states) + begin * p_.hidden_size * 2;
    kernels_.widen[static_cast<int>(call_.type)](source, w_.x + begin * p_.hidden_size, (end - begin) * p_.hidden_size);
  }

  void prepare(int64_t task, size_t worker) {
    const int64_t block = task / router_rows_, part = task % router_rows_;
    const int64_t begin = block * kTokenBlock, end = std::min(begin + kTokenBlock, call_.tokens);
    if (router_rows_ == 1) widen_tokens(begin, end);
    if (p_.router.input == RouterInput::kWeight) {
      const int64_t first = router_rows_ > 1 ? part * kRows : 0;
      const int64_t last = router_rows_ > 1 ? std::min(first + kRows, p_.num_experts) : p_.num_experts;
      const float* tokens[kTokenBlock];
      for (int64_t t = begin; t < end; ++t) tokens[t - begin] = x_ + t * p_.hidden_size;
      for (int64_t row = first; row < last; row += kRows) {
        const RowBlock rows = row_block(p_.router.weight, row, std::min(row + kRows, last));
        rows.dot(rows.rows, rows.count, tokens, static_cast<int>(end - begin), p_.hidden_size,
                 w_.logits + begin * p_.num_experts + row, p_.num_experts);
      }
    }
    if (!w_.logits_left[block].arrive()) return;
    for (int64_t t = begin; t < end; ++t) choose(t, worker);
    if (!blocks_left_.arrive()) return;
    plan();
    unplanned_.arrive();
  }

  void choose(int64_t token, size_t worker) {
    const int64_t experts = p_.num_experts, k = p_.top_k;
    if (p_.shared_intermediate_size > 0) w_.shared_weights[token] = shared_weight(token);
    if (p_.router.input == RouterInput::kTopK) {
      const int64_t size = size_of(call_.topk_weights_type);
      kernels_.widen[static_cast<int>(call_.topk_weights_type)](
          static_cast<const std::byte*>(call_.topk_weights) + token * k * size, w_.weights + token * k, k);
      for (int64_t i = token * k; i < (token + 1) * k; ++i) {
        const int64_t id = raw_id(i);
        w_.ids[i] = id >= 0 && id < experts ? static_cast<int32_t>(id) : -1;
      }
      return;
    }
    float* logits = w_.logits + token * experts;
    if (p_.router.input == RouterInput::kLogits) {
      const int64_t size = size_of(call_.router_logits_type);
      kernels_.widen[static_cast<int>(call_.router_logits_type)](
          static_cast<const std::byte*>(call_.router_logits) + token * experts * size, logits, experts);
    } else if (!p_.router.bias.empty()) {
      for (int64_t e = 0; e < experts; ++e) logits[e] += p_.router.bias[e];
    }
    const int64_t at = static_cast<int64_t>(worker) * experts;
    route_token(p_.router, experts, k, logits, {w_.scores + 3 * at, w_.group_ids + at}, w_.ids + token * k,
                w_.weights + token * k);
  }

  float shared_weight(int64_t token) const {
    if (p_.shared_gate.data == nullptr) return 1.0f;
    const void* row = p_.shared_gate.data;
    const float* x = x_ + token * p_.hidden_size;
    float logit = 0.0f;
    kernels_.dot[static_cast<int>(p_.shared_gate.type)](&row, 1, &x, 1, p_.hidden_size, &logit, 1);
    return 1.0f / (1.0f + std::exp(-logit));
  }

  void plan() {
    if (p_.router.input == RouterInput::kTopK) {
      const int64_t n = call_.tokens * p_.top_k;
      const int32_t* bad = std::find(w_.ids, w_.ids + n, -1);
      if (bad != w_.ids + n) {
        bad_id_ = bad - w_.ids;
        return;
      }
    }
    make_plan(p_, call_.tokens, w_.ids, w_.weights, w_.shared_weights, w_.plan);
    routed_groups_ = static_cast<int64_t>(w_.plan.active.size()) - (p_.shared_intermediate_size > 0 ? 1 : 0);
    fc1_tasks_ = routed_groups_ * fc1_blocks_ + shared_fc1_blocks_;
    for (const int32_t g : w_.plan.active)
      w_.fc1_left[g].reset(static_cast<int32_t>(g == p_.num_experts ? shared_fc1_blocks_ : fc1_blocks_));
    if (call_.tokens_per_expert != nullptr)
      for (int64_t e = 0; e < p_.num_experts; ++e)
        call_.tokens_per_expert[e] += w_.plan.first[e + 1] - w_.plan.first[e];
  }

  // --- experts ---

  RowBlock row_block(const Matrix& matrix, int64_t first, int64_t last) const {
    RowBlock block;
    block.count = static_cast<int>(last - first);
    for (int i = 0; i < block.count; ++i) block.rows[i] = matrix.row(first + i);
    block.dot = kernels_.dot[static_cast<int>(matrix.type)];
    return block;
  }

  // With enough tokens to pay for it, 16-bit rows are converted here, once; conversion is exact, so the results do not
  // depend on it. `room` has space for the block, or is nullptr in a call of few tokens.
  RowBlock row_block_for(const Matrix& matrix, int64_t first, int64_t last, int64_t k, int64_t tokens,
                         float* room) const {
    RowBlock block = row_block(matrix, first, last);
    if (room == nullptr || matrix.type == DataType::kFloat32 || tokens < kWidenFrom || kRows * k * 4 > kWidenBytes)
      return block;
    for (int i = 0; i < block.count; ++i) {
      kernels_.widen[static_cast<int>(matrix.type)](block.rows[i], room + i * k, k);
      block.rows[i] = room + i * k;
    }
    block.dot = kernels_.dot[static_cast<int>(DataType::kFloat32)];
    return block;
  }

  float* rows_of(size_t worker) const {
    return w_.rows == nullptr ? nullptr : w_.rows + static_cast<int64_t>(worker) * block_floats(p_);
  }

  // Where the kernels read the `n` tokens of the slots from `slot` on: x itself, or x times its mixing weight.
  void gather(int64_t slot, int n, bool weighted, size_t worker, const float** tokens) const {
    const int64_t k = p_.hidden_size;
    for (int t = 0; t < n; ++t) {
      const float* x = tokens[t] = x_ + w_.plan.token[slot + t] * k;
      if (!weighted) continue;
      float* scaled = w_.scaled + (static_cast<int64_t>(worker) * chunk_of(k) + t) * k;
      for (int64_t i = 0; i < k; ++i) scaled[i] = x[i] * w_.plan.weight[slot + t];
      tokens[t] = scaled;
    }
  }

  void fc1(int64_t task, size_t worker) {
    const bool is_shared = task >= routed_groups_ * fc1_blocks_;
    const int64_t block = is_shared ? task - routed_groups_ * fc1_blocks_ : task % fc1_blocks_;
    const int64_t group = is_shared ? p_.num_experts : w_.plan.active[task / fc1_blocks_];
    const Expert& expert = is_shared ? p_.shared : p_.experts[group];
    const bool gated = is_shared ? p_.shared_gated : p_.gated;
    const int64_t size = is_shared ? p_.shared_intermediate_size : p_.intermediate_size;
    const int64_t first = block * fc1_rows(gated), last = std::min(first + fc1_rows(gated), size);
    const int64_t rows = last - first, k = p_.hidden_size;
    const int64_t begin = w_.plan.first[group], end = w_.plan.first[group + 1];

    float* room = rows_of(worker);
    const RowBlock up = row_block_for(expert.up, first, last, k, end - begin, room);
    RowBlock gate{};
    if (gated)
      gate = row_block_for(expert.gate, first, last, k, end - begin, room == nullptr ? nullptr : room + rows * k);
    float* tile = w_.tile + static_cast<int64_t>(worker) * kMaxChunk * kRows;

    const float* tokens[kMaxChunk];
    for (int64_t slot = begin; slot < end; slot += chunk_of(k)) {
      const int n = static_cast<int>(std::min(chunk_of(k), end - slot));
      gather(slot, n, p_.weights_on_input && !is_shared, worker, tokens);
      up.dot(up.rows, up.count, tokens, n, k, tile + (gated ? rows : 0), kRows);
      if (gated) gate.dot(gate.rows, gate.count, tokens, n, k, tile, kRows);
      for (int t = 0; t < n; ++t) {
        float* g = tile + t * kRows;
        float* u = gated ? g + rows : g;
        add_bias(u, rows, expert.up_bias, first);
        if (gated) add_bias(g, rows, expert.gate_bias, first);
        kernels_.activation[static_cast<int>(p_.activation)](p_.activation_params, g, gated ? u : nullptr,
                                                             hidden_of(is_shared, slot + t) + first, rows);
      }
    }
    w_.fc1_left[group].arrive();
  }

  // What FC1 left for a slot: [I] or, of the shared expert, [S].
  float* hidden_of(bool is_shared, int64_t slot) const {
    if (!is_shared) return w_.hidden + slot * p_.intermediate_size;
    return w_.shared_hidden + (slot - call_.tokens * p_.top_k) * p_.shared_intermediate_size;
  }

  static void add_bias(float* values, int64_t n, const std::vector<float>& bias, int64_t first) {
    if (bias.empty()) return;
    for (int64_t i = 0; i < n; ++i) values[i] += bias[first + i];
  }

  void fc2(int64_t task, size_t worker) {
    const int64_t first = task * kRows, last = std::min(first + kRows, p_.hidden_size), rows = last - first;
    for (int64_t t = 0; t < call_.tokens; ++t) std::fill_n(sum_ + t * p_.hidden_size + first, rows, 0.0f);
    float* tile = w_.tile + static_cast<int64_t>(worker) * kMaxChunk * kRows;
    for (const int32_t group : w_.plan.active) {
      const bool is_shared = group == p_.num_experts;
      const Expert& expert = is_shared ? p_.shared : p_.experts[group];
      const int64_t k = is_shared ? p_.shared_intermediate_size : p_.intermediate_size;
      const int64_t begin = w_.plan.first[group], end = w_.plan.first[group + 1];
      const RowBlock down = row_block_for(expert.down, first, last, k, end - begin, rows_of(worker));
      w_.fc1_left[group].wait();
      const float* tokens[kMaxChunk];
      for (int64_t slot = begin; slot < end; slot += chunk_of(k)) {
        const int n = static_cast<int>(std::min(chunk_of(k), end - slot));
        for (int t = 0; t < n; ++t) tokens[t] = hidden_of(is_shared, slot + t);
        down.dot(down.rows, down.count, tokens, n, k, tile, kRows);
        for (int t = 0; t < n; ++t) {
          add_bias(tile + t * kRows, rows, expert.down_bias, first);
          const float weight = p_.weights_on_input && !is_shared ? 1.0f : w_.plan.weight[slot + t];
          float* sum = sum_ + w_.plan.token[slot + t] * p_.hidden_size + first;
          for (int64_t i = 0; i < rows; ++i) sum[i] += weight * tile[t * kRows + i];
        }
      }
    }
    if (call_.type == DataType::kFloat32) return;
    for (int64_t t = 0; t < call_.tokens; ++t) {
      const int64_t at = t * p_.hidden_size + first;
      kernels_.narrow[static_cast<int>(call_.type)](sum_ + at, static_cast<std::byte*>(call_.output) + at * 2, rows);
    }
  }

  const Params& p_;
  const KernelSet& kernels_;
  const Call& call_;
  Workspace w_;
  const float* x_;
  float* sum_;
  int64_t token_blocks_, router_rows_, prepare_tasks_, fc1_blocks_, shared_fc1_blocks_, fc2_tasks_;
  int64_t routed_groups_ = 0, fc1_tasks_ = 0;  // written by plan(), read after unplanned_
  int64_t bad_id_ = -1;                        // likewise: position of the first id out of range
  Countdown blocks_left_, unplanned_;
  std::atomic<int64_t> next_prepare_{0}, next_fc1_{0}, next_fc2_{0};
};

// The tokens [begin, begin + count) of a call.
Call piece_of(const Params& params, const Call& call, int64_t begin, int64_t count) {
  const auto from = [begin](const void* base, int64_t row_bytes) {
    return base == nullptr ? nullptr : static_cast<const std::byte*>(base) + begin * row_bytes;
  };
  Call piece = call;
  piece.tokens = count;
  piece.hidden_states = from(call.hidden_states, params.hidden_size * size_of(call.type));
  piece.output = static_cast<std::byte*>(call.output) + begin * params.hidden_size * size_of(call.type);
  piece.router_logits = from(call.router_logits, params.num_experts * size_of(call.router_logits_type));
  piece.topk_ids = from(call.topk_ids, params.top_k * (call.topk_ids_are_int64 ? 8 : 4));
  piece.topk_weights = from(call.topk_weights, params.top_k * size_of(call.topk_weights_type));
  return piece;
}

}  // namespace

int64_t most_tasks(const Params& params, int64_t tokens) {
  const int64_t groups = std::min(times(tokens, params.top_k), params.num_experts);
  const int64_t fc1 = groups * ceil_div(params.intermediate_size, fc1_rows(params.gated)) +
                      ceil_div(params.shared_intermediate_size, fc1_rows(params.shared_gated));
  const int64_t prepare = std::max(ceil_div(tokens, kTokenBlock), ceil_div(params.num_experts, kRows));
  return std::max({prepare, fc1, ceil_div(params.hidden_size, kRows)});
}

std::string forward(const Params& params, const KernelSet& kernels, const Call& call, void* workspace, int workers,
                    const Executor& executor) {
  if (call.tokens_per_expert != nullptr) std::fill_n(call.tokens_per_expert, params.num_experts, 0);
  const int64_t step = tokens_at_once(params, call);
  for (int64_t begin = 0; begin < call.tokens; begin += step) {
    const Call piece = piece_of(params, call, begin, std::min(step, call.tokens - begin));
    Layer layer(params, kernels, piece, carve(workspace, params, piece, workers));
    const auto work = [](void* self, size_t index) { static_cast<Layer*>(self)->work(index); };
    executor.parallel_for(executor.self, work, static_cast<size_t>(workers), &layer);
    if (std::string error = layer.error(begin); !error.empty()) return error;
  }
  return {};
}

}  // namespace hina
