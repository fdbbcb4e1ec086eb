#include "moe/workspace.h"

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "moe/blocking.h"
#include "moe/numa.h"

namespace hina {
namespace {

// Hands out pieces of one block of memory. With a null base it only measures.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    int64_t bytes = 0, end = 0;
    if (__builtin_mul_overflow(count, static_cast<int64_t>(sizeof(T)), &bytes) ||
        __builtin_add_overflow(bytes, 63, &bytes) || __builtin_add_overflow(used_, bytes & ~int64_t{63}, &end)) {
      overflow_ = true;
      return nullptr;
    }
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ = end;
    return piece;
  }

  int64_t used() const { return overflow_ ? -1 : used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
  bool overflow_ = false;
};

// What the matrices of one kind of expert ask for. Experts of a layer have the same formats, so that one stands for
// all; but their plain types may differ.
struct Needs {
  int64_t scratch[2] = {};           // of up and down, and of gate
  bool forms[kTokenFormCount] = {};  // of the tokens of FC1
  int64_t hidden_bytes = 0;
  ExpertTiles tiles;         // for the most tokens
  int64_t packed_bytes = 0;  // of a token in a panel of FC1; 0: no tiles
};

// Of a token of int8 codes in a panel; 0 for other kernels.
int64_t code_bytes(const TileKernel* kernel, int64_t k) {
  return kernel == nullptr || kernel->terms > 0 ? 0 : aligned(kernel->panel_bytes(k, 1));
}

// Whether the tokens of FC1 are kept in an int8 form.
bool quantises(int form, const Params& params, const Needs& needs, const Needs& shared_needs) {
  return (needs.forms[form] && !params.weights_on_input) || shared_needs.forms[form];
}

Needs needs_of(const Expert& expert, bool gated, int64_t hidden_size, int64_t size, const Params& params,
               const KernelSet& kernels, const Call& call) {
  Needs needs;
  const auto form = [&](const Matrix& m) { return token_form(m, params.int8_activations, kernels, call.type); };
  // The most tokens that an expert can have: ids that are handed in may name it several times for one token.
  const int64_t most = times(call.tokens, params.router.input == RouterInput::kTopK ? params.top_k : 1);
  const auto add = [&](const Matrix& m, int which, int64_t k) {
    if (m.quantised())
      needs.scratch[which] = std::max(needs.scratch[which], scratch_bytes(m, form(m), k, most, kernels));
  };
  for (const Matrix* m : {&expert.gate, &expert.up}) {
    if (m == &expert.gate && !gated) continue;
    needs.forms[static_cast<int>(form(*m))] = true;
    add(*m, m == &expert.gate, hidden_size);
  }
  add(expert.down, 0, size);
  // The plain types of the other experts may ask for float32.
  const TokenForm down = form(expert.down);
  needs.hidden_bytes = token_bytes(is_int8(down) ? down : TokenForm::kFloat32, size, kernels);
  const ExpertTiles tiles = needs.tiles = expert_tiles(expert, gated, params, kernels, call.type, most);
  if (tiles.first == nullptr) return needs;
  needs.packed_bytes = aligned(tiles.first->panel_bytes(hidden_size, 1));
  needs.hidden_bytes = std::max(needs.hidden_bytes, aligned(tiles.down->panel_bytes(size, 1)));
  for (const Matrix* m : {&expert.gate, &expert.up})
    if (m != &expert.gate || gated)
      needs.scratch[m == &expert.gate] =
          std::max(needs.scratch[m == &expert.gate], tile_scratch_bytes(*m, *tiles.first, kMostTileRows, hidden_size));
  needs.scratch[0] = std::max(needs.scratch[0], tile_scratch_bytes(expert.down, *tiles.down, kMostTileRows, size));
  return needs;
}

// Of the routed experts and of the shared one.
std::pair<Needs, Needs> all_needs(const Params& params, const KernelSet& kernels, const Call& call) {
  const int64_t size = params.intermediate_size, shared_size = params.shared_intermediate_size;
  return {needs_of(params.experts[0], params.gated, params.hidden_size, size, params, kernels, call),
          shared_size > 0
              ? needs_of(params.shared, params.shared_gated, params.hidden_size, shared_size, params, kernels, call)
              : Needs{}};
}

// Room for `tokens` tokens of each range of k but the first, which is all of k; one takes bytes_of(size of the range).
template <typename F>
Parts* take_parts(Carver& carver, const std::vector<KRange>& ranges, int64_t tokens, F bytes_of) {
  if (ranges.size() < 2) return nullptr;
  auto* parts = carver.take<Parts>(static_cast<int64_t>(ranges.size()));
  for (size_t r = 1; r < ranges.size(); ++r) {
    const int64_t bytes = bytes_of(ranges[r].size());
    auto* base = carver.take<std::byte>(times(tokens, bytes));
    if (parts != nullptr) parts[r] = {base, bytes};
  }
  return parts;
}

// What FC1 leaves as int8 tokens, which `down` takes one by one or in panels.
Parts* take_hidden_parts(Carver& carver, const Expert& expert, const Needs& needs, const std::vector<KRange>& ranges,
                         int64_t tokens, const Params& params, const KernelSet& kernels, const Call& call) {
  const TokenForm form = token_form(expert.down, params.int8_activations, kernels, call.type);
  if (!is_int8(form)) return nullptr;
  return take_parts(carver, ranges, tokens, [&](int64_t k) {
    return std::max(token_bytes(form, k, kernels), code_bytes(needs.tiles.down, k));
  });
}

// What only a NumaPlan takes.
void take_placed(Carver& carver, const Params& params, const KernelSet& kernels, const Call& call, int workers,
                 const Needs& needs, const Needs& shared_needs, Workspace& w) {
  const NumaPlan& plan = *call.numa;
  const int64_t slots = slot_count(params, call.tokens), experts = params.num_experts;
  w.queues = carver.take<NodeQueue>(2 * plan.nodes);
  auto* firsts = carver.take<int32_t>(2 * plan.nodes * (experts + 2));
  if (firsts != nullptr)
    for (int i = 0; i < 2 * plan.nodes; ++i) (new (&w.queues[i]) NodeQueue)->first = firsts + i * (experts + 2);
  w.fc1_items_left = carver.take<Countdown>((experts + 1) * plan.most_fc1_windows);
  w.fc2_items_left = carver.take<Countdown>(plan.experts[0].down->windows());
  w.fc1_results = carver.take<float>(times(slots, plan.fc1_results));
  w.fc2_results = carver.take<float>(times(slots, plan.fc2_results));
  w.joined = carver.take<float>(times(workers, 2 * plan.most_window * kPanelTokens));
  for (int f = static_cast<int>(TokenForm::kInt8By8); f < kTokenFormCount; ++f)
    if (quantises(f, params, needs, shared_needs))
      w.token_parts[f] = take_parts(carver, plan.ranges[kFc1], call.tokens,
                                    [&](int64_t k) { return token_bytes(static_cast<TokenForm>(f), k, kernels); });
  const auto in_panel = [&](int64_t k) {
    return std::max(code_bytes(needs.tiles.first, k), code_bytes(shared_needs.tiles.first, k));
  };
  if (in_panel(1) > 0) w.packed_parts = take_parts(carver, plan.ranges[kFc1], slots, in_panel);
  w.hidden_parts[0] = take_hidden_parts(carver, params.experts[0], needs, plan.ranges[kFc2],
                                        times(call.tokens, params.top_k), params, kernels, call);
  if (params.shared_intermediate_size > 0)
    w.hidden_parts[1] = take_hidden_parts(carver, params.shared, shared_needs, plan.ranges[kSharedFc2], call.tokens,
                                          params, kernels, call);
}

Workspace take_all(Carver& carver, const Params& params, const KernelSet& kernels, const Call& call, int workers) {
  const int64_t tokens = call.tokens, experts = params.num_experts, k = params.top_k;
  const int64_t shared_tokens = params.shared_intermediate_size > 0 ? tokens : 0;
  const int64_t slots = times(tokens, k + (shared_tokens > 0 ? 1 : 0));
  const auto [needs, shared_needs] = all_needs(params, kernels, call);
  Workspace w;
  w.in_tiles = needs.packed_bytes > 0;
  w.shared_in_tiles = shared_needs.packed_bytes > 0;
  if (call.type != DataType::kFloat32) {
    w.x = carver.take<float>(times(tokens, params.hidden_size));
    w.sum = carver.take<float>(times(tokens, params.hidden_size));
  }
  w.logits = carver.take<float>(params.router.input == RouterInput::kTopK ? 0 : times(tokens, experts));
  w.ids = carver.take<int32_t>(times(tokens, k));
  w.weights = carver.take<float>(times(tokens, k));
  w.shared_weights = carver.take<float>(shared_tokens);
  w.plan.first = {carver.take<int64_t>(experts + 2), static_cast<size_t>(experts + 2)};
  w.plan.token = {carver.take<int32_t>(slots), static_cast<size_t>(slots)};
  w.plan.weight = {carver.take<float>(slots), static_cast<size_t>(slots)};
  w.plan.active = {carver.take<int32_t>(experts + 1), static_cast<size_t>(experts + 1)};
  for (int form = static_cast<int>(TokenForm::kInt8By8); form < kTokenFormCount; ++form)
    if (quantises(form, params, needs, shared_needs))
      w.tokens[form] =
          carver.take<std::byte>(times(tokens, token_bytes(static_cast<TokenForm>(form), params.hidden_size, kernels)));
  w.hidden_bytes = needs.hidden_bytes;
  w.shared_hidden_bytes = shared_needs.hidden_bytes;
  w.hidden = carver.take<std::byte>(times(times(tokens, k), w.hidden_bytes));
  w.shared_hidden = carver.take<std::byte>(times(shared_tokens, w.shared_hidden_bytes));
  w.packed_bytes = std::max(needs.packed_bytes, shared_needs.packed_bytes);
  if (w.packed_bytes > 0) {
    w.packed = carver.take<std::byte>(times(slots, w.packed_bytes));
    w.packs = carver.take<PackTask>(slots / kPanelTokens + experts + 1);
  }
  w.packs_left = carver.take<Countdown>(experts + 1);
  w.order = carver.take<int32_t>(experts + 1);
  w.logits_left = carver.take<Countdown>(ceil_div(tokens, kTokenBlock));
  w.fc1_left = carver.take<Countdown>(experts + 1);
  for (int which = 0; which < 2; ++which) {
    w.scratch_bytes[which] = std::max(needs.scratch[which], shared_needs.scratch[which]);
    if (w.scratch_bytes[which] > 0) w.scratch[which] = carver.take<std::byte>(times(workers, w.scratch_bytes[which]));
  }
  if (params.weights_on_input) {
    for (int form = 0; form < kTokenFormCount; ++form)
      if (needs.forms[form])
        w.scaled_bytes =
            std::max(w.scaled_bytes, token_bytes(static_cast<TokenForm>(form), params.hidden_size, kernels));
    w.scaled_bytes = ceil_div(std::max(w.scaled_bytes, params.hidden_size * 4), 64) * 64;
    w.scaled = carver.take<float>(times(params.hidden_size, workers));
    w.scaled_tokens = carver.take<std::byte>(times(chunk_of(w.scaled_bytes) * workers, w.scaled_bytes));
  }
  w.tile = carver.take<float>(kTileFloats * workers);
  w.scores = carver.take<float>(3 * experts * workers);
  w.group_ids = carver.take<int32_t>(experts * workers);
  if (call.numa != nullptr || call.copies != nullptr || call.reads != nullptr)
    w.node_of_worker = carver.take<int32_t>(workers);
  if (call.numa != nullptr) take_placed(carver, params, kernels, call, workers, needs, shared_needs, w);
  return w;
}

}  // namespace

int64_t times(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}

int64_t tokens_at_once(const Params& params, const KernelSet& kernels, const Call& call) {
  if (call.tokens_at_once > 0) return call.tokens_at_once;
  const int64_t narrow = call.type == DataType::kFloat32 ? 0 : 2 * params.hidden_size;
  const int64_t int8 = params.int8_activations ? params.hidden_size : 0;  // more than the codes take
  const auto [needs, shared_needs] = all_needs(params, kernels, call);
  const int64_t packed = (params.top_k * needs.packed_bytes + shared_needs.packed_bytes) / 4;
  const int64_t floats = times(params.top_k, params.intermediate_size) + params.shared_intermediate_size + narrow +
                         int8 + packed + params.num_experts + 4 * params.top_k;
  return std::max(kPieceBytes / 4 / floats, kLeastPiece);
}

Call first_piece(const Params& params, const KernelSet& kernels, const Call& call) {
  Call piece = call;
  piece.tokens = std::min(call.tokens, tokens_at_once(params, kernels, call));
  if (!uses_numa(call.numa, params, piece.tokens)) piece.numa = nullptr;
  return piece;
}

int64_t workspace_bytes(const Params& params, const KernelSet& kernels, const Call& call, int workers) {
  Carver carver(nullptr);
  const Call piece = first_piece(params, kernels, call);
  take_all(carver, params, kernels, piece, workers);
  return carver.used();
}

Workspace carve(void* memory, const Params& params, const KernelSet& kernels, const Call& call, int workers) {
  Carver carver(memory);
  return take_all(carver, params, kernels, call, workers);
}

}  // namespace hina
