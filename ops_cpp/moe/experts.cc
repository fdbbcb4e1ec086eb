// Layer: the two projections of the experts, by vectors.
#include <cstring>
#include <optional>

#include "moe/layer.h"

namespace hina {
namespace {

// Tokens of a chunk, of `bytes` each, for which a tile has room.
int64_t chunk_for(int64_t rows, int64_t bytes) {
  return std::min(chunk_of(bytes), kMaxChunk * kRows / std::max<int64_t>(rows, kRows));
}

}  // namespace

std::byte* Layer::scratch_of(size_t worker, int which) const {
  std::byte* all = w_.scratch[which];
  return all == nullptr ? nullptr : all + static_cast<int64_t>(worker) * w_.scratch_bytes[which];
}

// What FC1 leaves for a slot.
std::byte* Layer::hidden_of(const Kind& kind, int64_t slot) const {
  if (&kind == &routed_) return w_.hidden + slot * w_.hidden_bytes;
  return w_.shared_hidden + (slot - call_.tokens * p_.top_k) * w_.shared_hidden_bytes;
}

void add_bias(float* values, int64_t rows, int64_t n, const std::vector<float>& bias, int64_t first) {
  if (bias.empty()) return;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t t = 0; t < n; ++t) values[r * n + t] += bias[first + r];
}

void take_turns(float* values, int64_t rows, int64_t n, bool gate_first) {
  float gate[std::max(kFewRows, kMostTileRows * kPanelTokens)];
  for (int64_t r = 0; r < rows; ++r) {
    const float* pair = values + 2 * r * n;
    std::copy_n(gate_first ? pair : pair + n, n, gate + r * n);
    std::memmove(values + r * n, gate_first ? pair + n : pair, static_cast<size_t>(n) * 4);
  }
  std::copy_n(gate, rows * n, values + rows * n);
}

// Where a matrix that takes the form `form` reads the `n` tokens of the slots from `slot` on.
void Layer::gather(TokenForm form, int64_t slot, int n, const void** tokens) const {
  const int64_t bytes = token_bytes(form, p_.hidden_size, kernels_);
  const std::byte* base = form == TokenForm::kFloat32    ? reinterpret_cast<const std::byte*>(x_)
                          : form == TokenForm::kBFloat16 ? static_cast<const std::byte*>(call_.hidden_states)
                                                         : w_.tokens[static_cast<int>(form)];
  for (int t = 0; t < n; ++t) tokens[t] = base + w_.plan.token[slot + t] * bytes;
}

// The same of a range of k, with every token multiplied by its mixing weight.
void Layer::gather_scaled(TokenForm form, const KRange& range, int64_t slot, int n, size_t worker,
                          const void** tokens) const {
  const int64_t k = range.size();
  float* scaled = w_.scaled + static_cast<int64_t>(worker) * p_.hidden_size;
  for (int t = 0; t < n; ++t) {
    const float* x = x_ + w_.plan.token[slot + t] * p_.hidden_size + range.from;
    std::byte* to = w_.scaled_tokens + (static_cast<int64_t>(worker) * chunk_of(w_.scaled_bytes) + t) * w_.scaled_bytes;
    float* values = form == TokenForm::kFloat32 ? reinterpret_cast<float*>(to) : scaled;
    for (int64_t i = 0; i < k; ++i) values[i] = x[i] * w_.plan.weight[slot + t];
    if (form != TokenForm::kFloat32) store_token(form, values, 0, k, k, to);
    tokens[t] = to;
  }
}

// Values [from, to) of a token of k values, of which x holds the first.
void Layer::store_token(TokenForm form, const float* x, int64_t from, int64_t to, int64_t k, std::byte* token) const {
  if (is_int8(form))
    quantise(form, x, from, to, k, token);
  else if (form == TokenForm::kBFloat16)
    kernels_.narrow[static_cast<int>(DataType::kBFloat16)](x, token + from * 2, to - from);
  else
    std::memcpy(token + from * 4, x, static_cast<size_t>(to - from) * 4);
}

Layer::Fc1Blocks Layer::fc1_blocks(const Expert& expert, int64_t first, int64_t last) {
  if (expert.gate_up.data == nullptr) return {{{&expert.up, first, last}, {&expert.gate, first, last}}, false};
  const Matrix* both = &expert.gate_up;
  return {{{both, 2 * first, first + last}, {both, first + last, 2 * last}}, true};
}

int64_t Layer::fc1_step(int64_t group, const Expert& expert, const Kind& kind) const {
  const auto step_of = [&](const Matrix& m) {
    return rows_at_once(m, form(m), p_.hidden_size, tokens_of(group), kernels_);
  };
  return kind.gated ? std::min(step_of(expert.up), step_of(expert.gate)) : step_of(expert.up);
}

void Layer::fc1(int64_t task, size_t worker) {
  const bool is_shared = task >= routed_groups_ * routed_.fc1_tasks;
  const Kind& kind = is_shared ? shared_ : routed_;
  const int64_t part = is_shared ? task - routed_groups_ * routed_.fc1_tasks : task % routed_.fc1_tasks;
  const int64_t group = group_of(task);
  const int64_t first = part * kind.task_rows, last = std::min(first + kind.task_rows, kind.size);
  if (w_.node_of_worker != nullptr) see_node(worker);
  const Expert& expert = expert_of(group, worker);
  record(expert.up, p_.hidden_size, first, last, worker);
  if (kind.gated) record(expert.gate, p_.hidden_size, first, last, worker);
  if (const ExpertTiles tiles = tiles_of(group); tiles.first != nullptr) {
    fc1_in_tiles(group, tiles, first, last, worker);
    w_.fc1_left[group].arrive();
    return;
  }
  const int64_t step = fc1_step(group, expert, kind);
  for (int64_t row = first, end; row < last; row = end) {
    end = std::min(row + step, last);
    RowBlock next = fc1_blocks(expert, end, std::min(end + step, kind.size)).parts[0];
    if (end == kind.size)
      next = task + 1 < fc1_tasks_ && !is_shared ? fc1_blocks(expert_of(group_of(task + 1), worker), 0, step).parts[0]
                                                 : RowBlock{};
    fc1_rows_of(group, expert, kind, row, end, next, worker);
  }
  w_.fc1_left[group].arrive();
}

// The group of a task of FC1.
int64_t Layer::group_of(int64_t task) const {
  return task < routed_groups_ * routed_.fc1_tasks ? w_.order[task / routed_.fc1_tasks] : p_.num_experts;
}

void Layer::fc1_rows_of(int64_t group, const Expert& expert, const Kind& kind, int64_t first, int64_t last,
                        const RowBlock& next, size_t worker) {
  const int64_t rows = last - first, k = p_.hidden_size;
  const int64_t begin = w_.plan.first[group], end = w_.plan.first[group + 1];
  const auto [parts, in_turns] = fc1_blocks(expert, first, last);
  const TokenForm forms[2] = {form(*parts[0].matrix), kind.gated ? form(*parts[1].matrix) : form(expert.up)};
  const Projection one(parts[0], kind.gated ? parts[1] : next, k, forms[0], end - begin, kernels_,
                       scratch_of(worker, 0));
  std::optional<Projection> other;
  if (kind.gated) other.emplace(parts[1], next, k, forms[1], end - begin, kernels_, scratch_of(worker, 1));
  float* tile = tile_of(worker);
  const bool scaled = is_scaled(kind);
  const int64_t chunk =
      chunk_for(rows, scaled ? w_.scaled_bytes
                             : std::max(token_bytes(forms[0], k, kernels_), token_bytes(forms[1], k, kernels_)));
  const auto take = [&](TokenForm form, int64_t slot, int n, const void** tokens) {
    if (scaled)
      gather_scaled(form, {0, k}, slot, n, worker, tokens);
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
      if (in_turns) take_turns(up, rows, 1, expert.gate.data == expert.gate_up.data);
      finish_token(group, first, last, slot + t, up, gate);
    }
  }
}

// From products to what FC2 takes of a token; leaves it in `gate`, which is `up` where there is no gate.
void Layer::finish_token(int64_t group, int64_t first, int64_t last, int64_t slot, float* up, float* gate) const {
  const Expert& expert = expert_of(group);
  const Kind& kind = kind_of(group);
  const int64_t rows = last - first;
  add_bias(up, rows, 1, expert.up_bias, first);
  if (kind.gated) add_bias(gate, rows, 1, expert.gate_bias, first);
  kernels_.activation[static_cast<int>(p_.activation)](p_.activation_params, gate, kind.gated ? up : nullptr, gate,
                                                       rows);
  store_token(form(expert.down), gate, first, last, kind.size, hidden_of(kind, slot));
}

void Layer::fc2(int64_t task, size_t worker) {
  const int64_t first = task * fc2_task_rows_, last = std::min(first + fc2_task_rows_, p_.hidden_size);
  if (w_.node_of_worker != nullptr) see_node(worker);
  begin_output(first, last - first);
  const auto& active = w_.plan.active;
  for (size_t i = 0; i < active.size(); ++i) {
    const Expert& expert = expert_of(active[i], worker);
    const Kind& kind = kind_of(active[i]);
    record(expert.down, kind.size, first, last, worker);
    if (const ExpertTiles tiles = tiles_of(active[i]); tiles.first != nullptr) {
      fc2_in_tiles(active[i], tiles, first, last, worker);
      continue;
    }
    const int64_t step = rows_at_once(expert.down, form(expert.down), kind.size, tokens_of(active[i]), kernels_);
    const bool is_last = i + 1 == active.size();
    for (int64_t row = first, end; row < last; row = end) {
      end = std::min(row + step, last);
      const int64_t next = end == last && !is_last ? first : end;
      const Expert& then = end < last ? expert : expert_of(active[is_last ? 0 : i + 1], worker);
      fc2_rows_of(active[i], expert, kind, row, end, {&then.down, next, next + step}, worker);
    }
  }
  end_output(first, last - first);
}

void Layer::begin_output(int64_t first, int64_t rows) {
  for (int64_t t = 0; t < call_.tokens; ++t) std::fill_n(sum_ + t * p_.hidden_size + first, rows, 0.0f);
}

void Layer::end_output(int64_t first, int64_t rows) {
  if (call_.type == DataType::kFloat32) return;
  for (int64_t t = 0; t < call_.tokens; ++t) {
    const int64_t at = t * p_.hidden_size + first;
    kernels_.narrow[static_cast<int>(call_.type)](sum_ + at, static_cast<std::byte*>(call_.output) + at * 2, rows);
  }
}

void Layer::fc2_rows_of(int32_t group, const Expert& expert, const Kind& kind, int64_t first, int64_t last,
                        const RowBlock& next, size_t worker) {
  const int64_t rows = last - first;
  const int64_t begin = w_.plan.first[group], end = w_.plan.first[group + 1];
  const TokenForm down_form = form(expert.down);
  const Projection down({&expert.down, first, last}, next, kind.size, down_form, end - begin, kernels_,
                        scratch_of(worker, 0));
  w_.fc1_left[group].wait();
  float* tile = tile_of(worker);
  const int64_t chunk = chunk_for(rows, token_bytes(down_form, kind.size, kernels_));
  const void* tokens[kMaxChunk];
  for (int64_t slot = begin; slot < end; slot += chunk) {
    const int n = static_cast<int>(std::min(chunk, end - slot));
    for (int t = 0; t < n; ++t) tokens[t] = hidden_of(kind, slot + t);
    down.multiply(tokens, n, tile, rows);
    for (int t = 0; t < n; ++t) add_token(group, first, rows, slot + t, tile + t * rows);
  }
}

void Layer::add_token(int64_t group, int64_t first, int64_t rows, int64_t slot, float* values) {
  add_bias(values, rows, 1, expert_of(group).down_bias, first);
  const float weight = is_scaled(kind_of(group)) ? 1.0f : w_.plan.weight[slot];
  float* sum = sum_ + w_.plan.token[slot] * p_.hidden_size + first;
  for (int64_t i = 0; i < rows; ++i) sum[i] += weight * values[i];
}

}  // namespace hina
