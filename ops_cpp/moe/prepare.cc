// Layer: activations to float32, router, the order of the tokens, and the tasks that follow from it.
#include <cmath>
#include <cstring>
#include <optional>

#include "moe/layer.h"
#include "moe/routing.h"

namespace hina {

int64_t Layer::raw_id(int64_t index) const {
  const auto* ids = static_cast<const std::byte*>(call_.topk_ids);
  int64_t wide;
  int32_t narrow;
  if (call_.topk_ids_are_int64)
    std::memcpy(&wide, ids + index * 8, 8);
  else
    std::memcpy(&narrow, ids + index * 4, 4);
  return call_.topk_ids_are_int64 ? wide : narrow;
}

void Layer::widen_tokens(int64_t begin, int64_t end) {
  if (call_.type == DataType::kFloat32) return;
  const auto* source = static_cast<const std::byte*>(call_.hidden_states) + begin * p_.hidden_size * 2;
  kernels_.widen[static_cast<int>(call_.type)](source, w_.x + begin * p_.hidden_size, (end - begin) * p_.hidden_size);
}

void Layer::quantise_tokens(int64_t begin, int64_t end, int64_t step) {
  for (int f = 0; f < kTokenFormCount; ++f)
    for (int64_t t = begin; w_.tokens[f] != nullptr && t < end; t += step)
      quantise(static_cast<TokenForm>(f), x_ + t * p_.hidden_size, 0, p_.hidden_size, p_.hidden_size,
               w_.tokens[f] + t * token_bytes(static_cast<TokenForm>(f), p_.hidden_size, kernels_));
  if (call_.numa != nullptr)
    for (int64_t t = begin; t < end; t += step) quantise_parts(t);
}

void Layer::quantise(TokenForm form, const float* x, int64_t from, int64_t to, int64_t k, void* token) const {
  qdot_of(form, kernels_).quantise(x, from, to, k, unit_of(form), token);
}

void Layer::prepare(int64_t task, size_t worker) {
  const int64_t block = task / router_rows_, part = task % router_rows_;
  const int64_t begin = block * kTokenBlock, end = std::min(begin + kTokenBlock, call_.tokens);
  if (router_rows_ == 1) widen_tokens(begin, end);
  quantise_tokens(begin + part, end, router_rows_);
  if (p_.router.input == RouterInput::kWeight) {
    const int64_t first = router_rows_ > 1 ? part * kRows : 0;
    const int64_t last = router_rows_ > 1 ? std::min(first + kRows, p_.num_experts) : p_.num_experts;
    const void* tokens[kTokenBlock];
    for (int64_t t = begin; t < end; ++t) tokens[t - begin] = x_ + t * p_.hidden_size;
    for (int64_t row = first; row < last; row += kRows)
      Projection({&p_.router.weight, row, std::min(row + kRows, last)}, {}, p_.hidden_size, TokenForm::kFloat32,
                 end - begin, kernels_, nullptr)
          .multiply(tokens, static_cast<int>(end - begin), w_.logits + begin * p_.num_experts + row, p_.num_experts);
  }
  if (!w_.logits_left[block].arrive()) return;
  for (int64_t t = begin; t < end; ++t) choose(t, worker);
  if (!blocks_left_.arrive()) return;
  plan();
  unplanned_.arrive();
}

void Layer::choose(int64_t token, size_t worker) {
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
  route_token(kernels_.route, p_.router, experts, k, logits, {w_.scores + 3 * at, w_.group_ids + at},
              w_.ids + token * k, w_.weights + token * k);
}

float Layer::shared_weight(int64_t token) const {
  if (p_.shared_gate.data == nullptr) return 1.0f;
  const void* x = x_ + token * p_.hidden_size;
  float logit = 0.0f;
  Projection({&p_.shared_gate, 0, 1}, {}, p_.hidden_size, TokenForm::kFloat32, 1, kernels_, nullptr)
      .multiply(&x, 1, &logit, 1);
  return 1.0f / (1.0f + std::exp(-logit));
}

void Layer::plan() {
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
  order_groups();
  cut_tasks();
  cut_packs();
  for (const int32_t g : w_.plan.active)
    w_.fc1_left[g].reset(static_cast<int32_t>(g == p_.num_experts ? shared_.fc1_tasks : routed_.fc1_tasks));
  if (call_.numa != nullptr) plan_by_nodes();
  if (call_.tokens_per_expert != nullptr)
    for (int64_t e = 0; e < p_.num_experts; ++e) call_.tokens_per_expert[e] += w_.plan.first[e + 1] - w_.plan.first[e];
}

void Layer::order_groups() {
  std::copy(w_.plan.active.begin(), w_.plan.active.end(), w_.order);
  if (call_.tokens > 1)
    std::sort(w_.order, w_.order + routed_groups_, [this](int32_t a, int32_t b) {
      return tokens_of(a) != tokens_of(b) ? tokens_of(a) > tokens_of(b) : a < b;
    });
}

void Layer::cut_tasks() {
  const bool streams = call_.tokens * p_.top_k <= kStreamTokens * routed_groups_;
  // In tiles, the more rows there are, the more of them share the loads of a panel.
  const int64_t most = streams ? kMostRun : w_.in_tiles ? kMostTileRows / kRows : 1;
  const auto run_of = [&](int64_t blocks) {
    return std::clamp<int64_t>(blocks / (kTasksPerWorker * workers_), 1, most);
  };
  const int64_t routed_blocks = ceil_div(routed_.size, kRows);
  const int64_t run = run_of(routed_groups_ * routed_blocks);
  routed_.fc1_tasks = ceil_div(routed_blocks, run);
  routed_.task_rows = run * kRows;
  fc1_tasks_ = routed_groups_ * routed_.fc1_tasks;
  shared_.task_rows = kRows;
  if (shared_.size > 0) fc1_tasks_ += shared_.fc1_tasks = ceil_div(shared_.size, shared_.task_rows);
  fc2_task_rows_ = run_of(ceil_div(p_.hidden_size, kRows)) * kRows;
  fc2_tasks_ = ceil_div(p_.hidden_size, fc2_task_rows_);
}

}  // namespace hina
