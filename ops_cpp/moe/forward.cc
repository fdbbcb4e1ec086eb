// How the work is cut. Every task is claimed by one fetch_add, in this order:
//
//   prepare  a block of tokens: activations to float32, router logits; whoever finishes the last logits of a block
//            chooses its experts, and whoever finishes the last block makes the plan. When the tokens make only one
//            block, the tasks of a router inside the op are blocks of its rows instead.
//   pack     up to 16 tokens of a group that is multiplied in tiles (tiles.cc): gathered, converted, packed
//   FC1      (group, block of rows): gate and up rows of one expert for all its tokens, then the activation; the groups
//            with the most tokens come first, so that the last tasks are small
//   FC2      a block of output rows, for ALL groups in ascending order: down rows times what FC1 left, weighted,
//            added to the output. One task owns an output element: nothing is atomic, the order of the sum is fixed.
//
// An FC2 task waits for the FC1 countdown of a group just before it needs it; all FC1 tasks are claimed by then (see
// Countdown). Kernels see all rows of a block against a chunk of tokens that stays in the L2 cache.
//
// Tokens whose weights want them in int8 are quantised once: those of FC1 in `prepare`, those of FC2 where FC1 stores
// them. A block of FC1 has as many rows as a unit of codes.
//
// With few tokens an expert's weights are streamed from memory: then a task is a run of several blocks that lie one
// after the other. Every block is told which one comes next, for its kernel to ask for.
#include "moe/forward.h"

#include <new>

#include "moe/layer.h"
#include "runtime/amx.h"

namespace hina {

Layer::Layer(const Params& params, const KernelSet& kernels, const Call& call, const Workspace& workspace, int workers,
             const Executor& executor)
    : p_(params), kernels_(kernels), call_(call), w_(workspace), executor_(executor), workers_(workers) {
  x_ = call.type == DataType::kFloat32 ? static_cast<const float*>(call.hidden_states) : w_.x;
  sum_ = call.type == DataType::kFloat32 ? static_cast<float*>(call.output) : w_.sum;
  token_blocks_ = ceil_div(call.tokens, kTokenBlock);
  router_rows_ = p_.router.input == RouterInput::kWeight && token_blocks_ == 1 ? ceil_div(p_.num_experts, kRows) : 1;
  prepare_tasks_ = token_blocks_ * router_rows_;
  for (int64_t b = 0; b < token_blocks_; ++b)
    (new (&w_.logits_left[b]) Countdown)->reset(static_cast<int32_t>(router_rows_));
  for (int64_t g = 0; g <= p_.num_experts; ++g) new (&w_.fc1_left[g]) Countdown, new (&w_.packs_left[g]) Countdown;
  blocks_left_.reset(static_cast<int32_t>(token_blocks_));
  unplanned_.reset(1);
  routed_ = {p_.intermediate_size, p_.gated};
  shared_ = {p_.shared_intermediate_size, p_.shared_gated};
  if (router_rows_ > 1) widen_tokens(0, call_.tokens);
}

void Layer::work(size_t worker) {
  const TileState tile_state(kernels_.amx);
  for (int64_t task; (task = next_prepare_.fetch_add(1, std::memory_order_relaxed)) < prepare_tasks_;)
    prepare(task, worker);
  unplanned_.wait();
  if (bad_id_ >= 0) return;
  if (call_.numa != nullptr) return work_by_nodes(worker);
  for (int64_t task; (task = next_pack_.fetch_add(1, std::memory_order_relaxed)) < pack_tasks_;) pack(task);
  for (int64_t task; (task = next_fc1_.fetch_add(1, std::memory_order_relaxed)) < fc1_tasks_;) fc1(task, worker);
  for (int64_t task; (task = next_fc2_.fetch_add(1, std::memory_order_relaxed)) < fc2_tasks_;) fc2(task, worker);
}

std::string Layer::error(int64_t begin) const {
  if (bad_id_ < 0) return {};
  return "topk_ids holds " + std::to_string(raw_id(bad_id_)) + " at position " +
         std::to_string(begin * p_.top_k + bad_id_) + ", expected 0.." + std::to_string(p_.num_experts - 1);
}

namespace {

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
  const int64_t fc1 =
      groups * ceil_div(params.intermediate_size, kRows) + ceil_div(params.shared_intermediate_size, kRows);
  const int64_t prepare = std::max(ceil_div(tokens, kTokenBlock), ceil_div(params.num_experts, kRows));
  return std::max({prepare, fc1, ceil_div(params.hidden_size, kRows)});
}

std::string forward(const Params& params, const KernelSet& kernels, const Call& call, void* workspace, int workers,
                    const Executor& executor) {
  if (call.tokens_per_expert != nullptr) std::fill_n(call.tokens_per_expert, params.num_experts, 0);
  const Call first = first_piece(params, kernels, call);
  const int64_t step = std::max<int64_t>(first.tokens, 1);
  for (int64_t begin = 0; begin < call.tokens; begin += step) {
    const Call piece = piece_of(params, first, begin, std::min(step, call.tokens - begin));
    Layer layer(params, kernels, piece, carve(workspace, params, kernels, piece, workers), workers, executor);
    const auto work = [](void* self, size_t index) { static_cast<Layer*>(self)->work(index); };
    executor.parallel_for(executor.self, work, static_cast<size_t>(workers), &layer);
    if (std::string error = layer.error(begin); !error.empty()) return error;
  }
  return {};
}

}  // namespace hina
