// Layer: experts that are multiplied in tiles (kernels/tile). Their tokens are packed once, 16 to a panel; FC1 leaves
// its results packed, where FC2 takes them from. Panels of a group lie one after the other, each at its first slot.
#include "moe/layer.h"

namespace hina {

ExpertTiles Layer::tiles_of(int64_t group) const {
  // Plain types of experts may differ; memory is there for what the first one takes.
  if (!(group == p_.num_experts ? w_.shared_in_tiles : w_.in_tiles)) return {};
  return expert_tiles(expert_of(group), kind_of(group).gated, p_, kernels_, call_.type, tokens_of(group));
}

// One task for each panel, in the order in which FC1 takes the groups.
void Layer::cut_packs() {
  pack_tasks_ = 0;
  for (size_t i = 0; i < w_.plan.active.size(); ++i) {
    const int32_t group = w_.order[i];
    if (tiles_of(group).first == nullptr) continue;
    const int64_t before = pack_tasks_, end = w_.plan.first[group + 1];
    for (int64_t slot = w_.plan.first[group]; slot < end; slot += kPanelTokens) w_.packs[pack_tasks_++] = {group, slot};
    w_.packs_left[group].reset(static_cast<int32_t>(pack_tasks_ - before));
  }
}

void Layer::pack(int64_t task) {
  const auto [group, slot] = w_.packs[task];
  const ExpertTiles tiles = tiles_of(group);
  std::byte* panel = w_.packed + slot * w_.packed_bytes;
  if (packed_of(tiles, group, slot) == panel) {
    const int64_t n = std::min<int64_t>(kPanelTokens, w_.plan.first[group + 1] - slot);
    const float* tokens[kPanelTokens];
    for (int64_t t = 0; t < n; ++t) tokens[t] = x_ + w_.plan.token[slot + t] * p_.hidden_size;
    const float* weights = is_scaled(kind_of(group)) ? &w_.plan.weight[slot] : nullptr;
    tiles.first->pack(tokens, weights, static_cast<int>(n), p_.hidden_size, panel);
  }
  w_.packs_left[group].arrive();
}

// The panel of FC1 that begins at `slot`. One token of bfloat16 is a panel as it is.
const void* Layer::packed_of(const ExpertTiles& tiles, int64_t group, int64_t slot) const {
  const bool as_it_is = tiles.first->terms == 1 && call_.type == DataType::kBFloat16 &&
                        w_.plan.first[group + 1] - slot == 1 && p_.hidden_size % 32 == 0 && !is_scaled(kind_of(group));
  if (!as_it_is) return w_.packed + slot * w_.packed_bytes;
  return static_cast<const std::byte*>(call_.hidden_states) + w_.plan.token[slot] * p_.hidden_size * 2;
}

void Layer::fc1_in_tiles(int64_t group, const ExpertTiles& tiles, int64_t first, int64_t last, size_t worker) {
  const Expert& expert = expert_of(group, worker);
  const bool gated = kind_of(group).gated;
  const int64_t k = p_.hidden_size, begin = w_.plan.first[group], end = w_.plan.first[group + 1];
  // As many rows as both kernels take: those of int8 pack whole units.
  const int parts = gated ? 2 : 1;
  const int64_t step =
      std::min(tile_rows_at_once(*tiles.first, end - begin, parts), tile_rows_at_once(*tiles.down, end - begin, parts));
  w_.packs_left[group].wait();
  for (int64_t row = first; row < last; row += step) {
    const int64_t rows = std::min(step, last - row);
    const auto [parts, in_turns] = fc1_blocks(expert, row, row + rows);
    const TileRows weights[2] = {
        tile_rows(parts[0], *tiles.first, k, kernels_, scratch_of(worker, 0)),
        gated ? tile_rows(parts[1], *tiles.first, k, kernels_, scratch_of(worker, 1)) : TileRows{}};
    for (int64_t slot = begin; slot < end; slot += kTileChunk) {
      const int64_t n = std::min(kTileChunk, end - slot);
      const void* panels[kTileChunk / kPanelTokens];
      for (int64_t t = 0; t < n; t += kPanelTokens) panels[t / kPanelTokens] = packed_of(tiles, group, slot + t);
      float* values = tile_of(worker);
      tiles.first->multiply(weights, panels, static_cast<int>(n), k, values);
      for (int64_t t = 0; t < n; t += kPanelTokens)
        activate(group, tiles, row, rows, slot + t, static_cast<int>(std::min<int64_t>(kPanelTokens, n - t)), in_turns,
                 values + t * (gated ? 2 : 1) * rows);
    }
  }
}

// From [rows of up, then of gate][n] products to what FC2 takes for the panel that begins at `slot`.
void Layer::activate(int64_t group, const ExpertTiles& tiles, int64_t first, int64_t rows, int64_t slot, int n,
                     bool in_turns, float* values) const {
  const Expert& expert = expert_of(group);
  const Kind& kind = kind_of(group);
  float* gate = kind.gated ? values + rows * n : values;
  if (in_turns) take_turns(values, rows, n, expert.gate.data == expert.gate_up.data);
  add_bias(values, rows, n, expert.up_bias, first);
  if (kind.gated) add_bias(gate, rows, n, expert.gate_bias, first);
  kernels_.activation[static_cast<int>(p_.activation)](p_.activation_params, gate, kind.gated ? values : nullptr, gate,
                                                       rows * n);
  tiles.down->pack_rows(gate, static_cast<int>(rows), n, first, kind.size, hidden_of(kind, slot));
}

void Layer::fc2_in_tiles(int64_t group, const ExpertTiles& tiles, int64_t first, int64_t last, size_t worker) {
  const Expert& expert = expert_of(group, worker);
  const Kind& kind = kind_of(group);
  const int64_t begin = w_.plan.first[group], end = w_.plan.first[group + 1];
  const int64_t step = tile_rows_at_once(*tiles.down, end - begin, 1);
  for (int64_t row = first; row < last; row += step) {
    const int64_t rows = std::min(step, last - row);
    const TileRows weights[2] = {
        tile_rows({&expert.down, row, row + rows}, *tiles.down, kind.size, kernels_, scratch_of(worker, 0)), {}};
    w_.fc1_left[group].wait();
    for (int64_t slot = begin; slot < end; slot += kTileChunk) {
      const int64_t n = std::min(kTileChunk, end - slot);
      const void* panels[kTileChunk / kPanelTokens];
      for (int64_t t = 0; t < n; t += kPanelTokens) panels[t / kPanelTokens] = hidden_of(kind, slot + t);
      float* values = tile_of(worker);
      tiles.down->multiply(weights, panels, static_cast<int>(n), kind.size, values);
      for (int64_t t = 0; t < n; t += kPanelTokens, values += kPanelTokens * rows) {
        const int count = static_cast<int>(std::min<int64_t>(kPanelTokens, n - t));
        add_panel(group, row, rows, slot + t, count, values);
      }
    }
  }
}

// Adds [rows][n] products of the panel that begins at `slot` to the sums of its tokens.
void Layer::add_panel(int64_t group, int64_t first, int64_t rows, int64_t slot, int n, float* values) {
  constexpr float kOnes[kPanelTokens] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  add_bias(values, rows, n, expert_of(group).down_bias, first);
  float* sums[kPanelTokens];
  for (int i = 0; i < n; ++i) sums[i] = sum_ + w_.plan.token[slot + i] * p_.hidden_size + first;
  kernels_.scatter(values, static_cast<int>(rows), n, is_scaled(kind_of(group)) ? kOnes : &w_.plan.weight[slot], sums);
}

}  // namespace hina
