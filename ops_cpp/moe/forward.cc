// How the work is cut. Every task is claimed by one fetch_add, in this order:
//
//   prepare  a block of tokens: activations to float32, router logits; whoever finishes the last logits of a block
//            chooses its experts, and whoever finishes the last block makes the plan. When the tokens make only one
//            block, the tasks of a router inside the op are blocks of its rows instead.
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

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <optional>

#include "moe/blocking.h"
#include "moe/projection.h"
#include "moe/routing.h"
#include "moe/workspace.h"

namespace hina {
namespace {

constexpr int64_t kTileRow = 2 * kRows;  // what one token leaves in a tile: up, then gate; or down

int64_t size_of(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

// One kind of expert, routed or shared.
struct Kind {
  int64_t size;  // I or S
  bool gated;
  int64_t task_rows = 0;  // of each matrix in a task
  int64_t fc1_tasks = 0;  // of one group
};

class Layer {
 public:
  Layer(const Params& params, const KernelSet& kernels, const Call& call, const Workspace& workspace, int workers)
      : p_(params), kernels_(kernels), call_(call), w_(workspace), workers_(workers) {
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
    routed_ = {p_.intermediate_size, p_.gated};
    shared_ = {p_.shared_intermediate_size, p_.shared_gated};
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

  TokenForm form(const Matrix& matrix) const { return token_form(matrix, p_.int8_activations, kernels_, call_.type); }

  // --- prepare ---

  void widen_tokens(int64_t begin, int64_t end) {
    if (call_.type == DataType::kFloat32) return;
    const auto* source = static_cast<const std::byte*>(call_.hidden_states) + begin * p_.hidden_size * 2;
    kernels_.widen[static_cast<int>(call_.type)](source, w_.x + begin * p_.hidden_size, (end - begin) * p_.hidden_size);
  }

  void quantise_tokens(int64_t begin, int64_t end, int64_t step) {
    for (int f = 0; f < kTokenFormCount; ++f)
      for (int64_t t = begin; w_.tokens[f] != nullptr && t < end; t += step)
        quantise(static_cast<TokenForm>(f), x_ + t * p_.hidden_size, 0, p_.hidden_size, p_.hidden_size,
                 w_.tokens[f] + t * token_bytes(static_cast<TokenForm>(f), p_.hidden_size, kernels_));
  }

  void quantise(TokenForm form, const float* x, int64_t from, int64_t to, int64_t k, void* token) const {
    qdot_of(form, kernels_).quantise(x, from, to, k, unit_of(form), token);
  }

  void prepare(int64_t task, size_t worker) {
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
    route_token(kernels_.route, p_.router, experts, k, logits, {w_.scores + 3 * at, w_.group_ids + at},
                w_.ids + token * k, w_.weights + token * k);
  }

  float shared_weight(int64_t token) const {
    if (p_.shared_gate.data == nullptr) return 1.0f;
    const void* x = x_ + token * p_.hidden_size;
    float logit = 0.0f;
    Projection({&p_.shared_gate, 0, 1}, {}, p_.hidden_size, TokenForm::kFloat32, 1, kernels_, nullptr)
        .multiply(&x, 1, &logit, 1);
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
    order_groups();
    cut_tasks();
    for (const int32_t g : w_.plan.active)
      w_.fc1_left[g].reset(static_cast<int32_t>(g == p_.num_experts ? shared_.fc1_tasks : routed_.fc1_tasks));
    if (call_.tokens_per_expert != nullptr)
      for (int64_t e = 0; e < p_.num_experts; ++e)
        call_.tokens_per_expert[e] += w_.plan.first[e + 1] - w_.plan.first[e];
  }

  // --- experts ---

  const Expert& expert_of(int64_t group) const { return group == p_.num_experts ? p_.shared : p_.experts[group]; }

  int64_t tokens_of(int64_t group) const { return w_.plan.first[group + 1] - w_.plan.first[group]; }

  void order_groups() {
    std::copy(w_.plan.active.begin(), w_.plan.active.end(), w_.order);
    if (call_.tokens > 1)
      std::sort(w_.order, w_.order + routed_groups_, [this](int32_t a, int32_t b) {
        return tokens_of(a) != tokens_of(b) ? tokens_of(a) > tokens_of(b) : a < b;
      });
  }

  void cut_tasks() {
    const bool streams = call_.tokens * p_.top_k <= kStreamTokens * routed_groups_;
    const auto run_of = [&](int64_t blocks) {
      return streams ? std::clamp<int64_t>(blocks / (kTasksPerWorker * workers_), 1, kMostRun) : 1;
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

  std::byte* scratch_of(size_t worker, int which) const {
    std::byte* all = w_.scratch[which];
    return all == nullptr ? nullptr : all + static_cast<int64_t>(worker) * w_.scratch_bytes[which];
  }

  // Where a matrix that takes the form `form` reads the `n` tokens of the slots from `slot` on.
  void gather(TokenForm form, int64_t slot, int n, const void** tokens) const {
    const int64_t bytes = token_bytes(form, p_.hidden_size, kernels_);
    const std::byte* base = form == TokenForm::kFloat32    ? reinterpret_cast<const std::byte*>(x_)
                            : form == TokenForm::kBFloat16 ? static_cast<const std::byte*>(call_.hidden_states)
                                                           : w_.tokens[static_cast<int>(form)];
    for (int t = 0; t < n; ++t) tokens[t] = base + w_.plan.token[slot + t] * bytes;
  }

  // The same with every token multiplied by its mixing weight.
  void gather_scaled(TokenForm form, int64_t slot, int n, size_t worker, const void** tokens) const {
    const int64_t k = p_.hidden_size;
    float* scaled = w_.scaled + static_cast<int64_t>(worker) * k;
    for (int t = 0; t < n; ++t) {
      const float* x = x_ + w_.plan.token[slot + t] * k;
      std::byte* to =
          w_.scaled_tokens + (static_cast<int64_t>(worker) * chunk_of(w_.scaled_bytes) + t) * w_.scaled_bytes;
      float* values = form == TokenForm::kFloat32 ? reinterpret_cast<float*>(to) : scaled;
      for (int64_t i = 0; i < k; ++i) values[i] = x[i] * w_.plan.weight[slot + t];
      if (form != TokenForm::kFloat32) store_token(form, values, 0, k, k, to);
      tokens[t] = to;
    }
  }

  // Values [from, to) of a token of k values, of which x holds the first.
  void store_token(TokenForm form, const float* x, int64_t from, int64_t to, int64_t k, std::byte* token) const {
    if (is_int8(form))
      quantise(form, x, from, to, k, token);
    else if (form == TokenForm::kBFloat16)
      kernels_.narrow[static_cast<int>(DataType::kBFloat16)](x, token + from * 2, to - from);
    else
      std::memcpy(token + from * 4, x, static_cast<size_t>(to - from) * 4);
  }

  // The rows of FC1 are read as two blocks of as many rows. They are those of up and of gate; or, where these lie in
  // turns, the two halves of the rows of both, so that what is read is one run of bytes.
  struct Fc1Blocks {
    RowBlock parts[2];
    bool in_turns;
  };

  static Fc1Blocks fc1_blocks(const Expert& expert, int64_t first, int64_t last) {
    if (expert.gate_up.data == nullptr) return {{{&expert.up, first, last}, {&expert.gate, first, last}}, false};
    const Matrix* both = &expert.gate_up;
    return {{{both, 2 * first, first + last}, {both, first + last, 2 * last}}, true};
  }

  int64_t fc1_step(int64_t group, const Expert& expert, const Kind& kind) const {
    const auto step_of = [&](const Matrix& m) {
      return rows_at_once(m, form(m), p_.hidden_size, tokens_of(group), kernels_);
    };
    return kind.gated ? std::min(step_of(expert.up), step_of(expert.gate)) : step_of(expert.up);
  }

  void fc1(int64_t task, size_t worker) {
    const bool is_shared = task >= routed_groups_ * routed_.fc1_tasks;
    const Kind& kind = is_shared ? shared_ : routed_;
    const int64_t part = is_shared ? task - routed_groups_ * routed_.fc1_tasks : task % routed_.fc1_tasks;
    const int64_t group = group_of(task);
    const Expert& expert = expert_of(group);
    const int64_t first = part * kind.task_rows, last = std::min(first + kind.task_rows, kind.size);
    const int64_t step = fc1_step(group, expert, kind);
    for (int64_t row = first, end; row < last; row = end) {
      end = std::min(row + step, last);
      RowBlock next = fc1_blocks(expert, end, std::min(end + step, kind.size)).parts[0];
      if (end == kind.size)
        next = task + 1 < fc1_tasks_ && !is_shared ? fc1_blocks(expert_of(group_of(task + 1)), 0, step).parts[0]
                                                   : RowBlock{};
      fc1_rows_of(group, expert, kind, row, end, next, worker);
    }
    w_.fc1_left[group].arrive();
  }

  // The group of a task of FC1.
  int64_t group_of(int64_t task) const {
    return task < routed_groups_ * routed_.fc1_tasks ? w_.order[task / routed_.fc1_tasks] : p_.num_experts;
  }

  void fc1_rows_of(int64_t group, const Expert& expert, const Kind& kind, int64_t first, int64_t last,
                   const RowBlock& next, size_t worker) {
    const bool is_shared = &kind == &shared_;
    const int64_t rows = last - first, k = p_.hidden_size;
    const int64_t begin = w_.plan.first[group], end = w_.plan.first[group + 1];
    const auto [parts, in_turns] = fc1_blocks(expert, first, last);
    const TokenForm forms[2] = {form(*parts[0].matrix), kind.gated ? form(*parts[1].matrix) : form(expert.up)};
    const Projection one(parts[0], kind.gated ? parts[1] : next, k, forms[0], end - begin, kernels_,
                         scratch_of(worker, 0));
    std::optional<Projection> other;
    if (kind.gated) other.emplace(parts[1], next, k, forms[1], end - begin, kernels_, scratch_of(worker, 1));
    float* tile = w_.tile + static_cast<int64_t>(worker) * kMaxChunk * kTileRow;
    const bool scaled = p_.weights_on_input && !is_shared;
    const int64_t chunk =
        chunk_for(rows, scaled ? w_.scaled_bytes
                               : std::max(token_bytes(forms[0], k, kernels_), token_bytes(forms[1], k, kernels_)));
    const auto take = [&](TokenForm form, int64_t slot, int n, const void** tokens) {
      if (scaled)
        gather_scaled(form, slot, n, worker, tokens);
      else
        gather(form, slot, n, tokens);
    };
    const void* tokens[kMaxChunk];
    for (int64_t slot = begin; slot < end; slot += chunk) {
      const int n = static_cast<int>(std::min(chunk, end - slot));
      take(forms[0], slot, n, tokens);
      one.multiply(tokens, n, tile, 2 * rows);
      if (kind.gated) {
        if (forms[1] != forms[0]) take(forms[1], slot, n, tokens);
        other->multiply(tokens, n, tile + rows, 2 * rows);
      }
      for (int t = 0; t < n; ++t) {
        float* up = tile + t * 2 * rows;
        float* gate = kind.gated ? up + rows : up;
        if (in_turns) take_turns(up, rows, expert.gate.data == expert.gate_up.data);
        add_bias(up, rows, expert.up_bias, first);
        if (kind.gated) add_bias(gate, rows, expert.gate_bias, first);
        kernels_.activation[static_cast<int>(p_.activation)](p_.activation_params, gate, kind.gated ? up : nullptr,
                                                             gate, rows);
        store_token(form(expert.down), gate, first, last, kind.size, hidden_of(is_shared, slot + t));
      }
    }
  }

  // Tokens of a chunk, of `bytes` each, for which a tile has room.
  static int64_t chunk_for(int64_t rows, int64_t bytes) {
    return std::min(chunk_of(bytes), kMaxChunk * kRows / std::max<int64_t>(rows, kRows));
  }

  // From values of gate and up in turns to those of up, then those of gate.
  static void take_turns(float* values, int64_t rows, bool gate_first) {
    float gate[kFewRows];
    for (int64_t i = 0; i < rows; ++i) {
      const float even = values[2 * i], odd = values[2 * i + 1];
      values[i] = gate_first ? odd : even;
      gate[i] = gate_first ? even : odd;
    }
    std::copy_n(gate, rows, values + rows);
  }

  // What FC1 leaves for a slot.
  std::byte* hidden_of(bool is_shared, int64_t slot) const {
    if (!is_shared) return w_.hidden + slot * w_.hidden_bytes;
    return w_.shared_hidden + (slot - call_.tokens * p_.top_k) * w_.shared_hidden_bytes;
  }

  static void add_bias(float* values, int64_t n, const std::vector<float>& bias, int64_t first) {
    if (bias.empty()) return;
    for (int64_t i = 0; i < n; ++i) values[i] += bias[first + i];
  }

  void fc2(int64_t task, size_t worker) {
    const int64_t first = task * fc2_task_rows_, last = std::min(first + fc2_task_rows_, p_.hidden_size);
    const int64_t rows = last - first;
    for (int64_t t = 0; t < call_.tokens; ++t) std::fill_n(sum_ + t * p_.hidden_size + first, rows, 0.0f);
    const auto& active = w_.plan.active;
    for (size_t i = 0; i < active.size(); ++i) {
      const Expert& expert = expert_of(active[i]);
      const Kind& kind = active[i] == p_.num_experts ? shared_ : routed_;
      const int64_t step = rows_at_once(expert.down, form(expert.down), kind.size, tokens_of(active[i]), kernels_);
      const bool is_last = i + 1 == active.size();
      for (int64_t row = first, end; row < last; row = end) {
        end = std::min(row + step, last);
        const int64_t next = end == last && !is_last ? first : end;
        const Expert& then = end < last ? expert : expert_of(active[is_last ? 0 : i + 1]);
        fc2_rows_of(active[i], expert, kind, row, end, {&then.down, next, next + step}, worker);
      }
    }
    if (call_.type == DataType::kFloat32) return;
    for (int64_t t = 0; t < call_.tokens; ++t) {
      const int64_t at = t * p_.hidden_size + first;
      kernels_.narrow[static_cast<int>(call_.type)](sum_ + at, static_cast<std::byte*>(call_.output) + at * 2, rows);
    }
  }

  void fc2_rows_of(int32_t group, const Expert& expert, const Kind& kind, int64_t first, int64_t last,
                   const RowBlock& next, size_t worker) {
    const bool is_shared = &kind == &shared_;
    const int64_t rows = last - first;
    const int64_t begin = w_.plan.first[group], end = w_.plan.first[group + 1];
    const TokenForm down_form = form(expert.down);
    const Projection down({&expert.down, first, last}, next, kind.size, down_form, end - begin, kernels_,
                          scratch_of(worker, 0));
    w_.fc1_left[group].wait();
    float* tile = w_.tile + static_cast<int64_t>(worker) * kMaxChunk * kTileRow;
    const int64_t chunk = chunk_for(rows, token_bytes(down_form, kind.size, kernels_));
    const void* tokens[kMaxChunk];
    for (int64_t slot = begin; slot < end; slot += chunk) {
      const int n = static_cast<int>(std::min(chunk, end - slot));
      for (int t = 0; t < n; ++t) tokens[t] = hidden_of(is_shared, slot + t);
      down.multiply(tokens, n, tile, rows);
      for (int t = 0; t < n; ++t) {
        add_bias(tile + t * rows, rows, expert.down_bias, first);
        const float weight = p_.weights_on_input && !is_shared ? 1.0f : w_.plan.weight[slot + t];
        float* sum = sum_ + w_.plan.token[slot + t] * p_.hidden_size + first;
        for (int64_t i = 0; i < rows; ++i) sum[i] += weight * tile[t * rows + i];
      }
    }
  }

  const Params& p_;
  const KernelSet& kernels_;
  const Call& call_;
  Workspace w_;
  Kind routed_{}, shared_{};
  const float* x_;
  float* sum_;
  int workers_;
  int64_t token_blocks_, router_rows_, prepare_tasks_;
  int64_t routed_groups_ = 0, fc1_tasks_ = 0, fc2_tasks_ = 0, fc2_task_rows_ = 0;  // by plan(), read after unplanned_
  int64_t bad_id_ = -1;  // likewise: position of the first id out of range
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
  const int64_t fc1 =
      groups * ceil_div(params.intermediate_size, kRows) + ceil_div(params.shared_intermediate_size, kRows);
  const int64_t prepare = std::max(ceil_div(tokens, kTokenBlock), ceil_div(params.num_experts, kRows));
  return std::max({prepare, fc1, ceil_div(params.hidden_size, kRows)});
}

std::string forward(const Params& params, const KernelSet& kernels, const Call& call, void* workspace, int workers,
                    const Executor& executor) {
  if (call.tokens_per_expert != nullptr) std::fill_n(call.tokens_per_expert, params.num_experts, 0);
  const int64_t step = tokens_at_once(params, call);
  for (int64_t begin = 0; begin < call.tokens; begin += step) {
    const Call piece = piece_of(params, call, begin, std::min(step, call.tokens - begin));
    Layer layer(params, kernels, piece, carve(workspace, params, kernels, piece, workers), workers);
    const auto work = [](void* self, size_t index) { static_cast<Layer*>(self)->work(index); };
    executor.parallel_for(executor.self, work, static_cast<size_t>(workers), &layer);
    if (std::string error = layer.error(begin); !error.empty()) return error;
  }
  return {};
}

}  // namespace hina
