// The memory of one call: every buffer that is written between routing and the output, cut from one allocation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/forward.h"
#include "moe/plan.h"
#include "moe/projection.h"
#include "moe/tile_rows.h"
#include "runtime/countdown.h"

namespace hina {

// Tokens of a group from `slot` on, for a panel.
struct PackTask {
  int32_t group;
  int64_t slot;
};

struct Workspace {
  float* x = nullptr;               // [T, H]; not taken when hidden_states is float32
  float* sum = nullptr;             // [T, H]; not taken when the output is float32
  float* logits = nullptr;          // [T, E]
  int32_t* ids = nullptr;           // [T, k]
  float* weights = nullptr;         // [T, k]
  float* shared_weights = nullptr;  // [T]
  Plan plan;
  std::byte* tokens[kTokenFormCount] = {};  // [T, token_bytes(H)] of the int8 forms that some FC1 matrix takes
  std::byte* hidden = nullptr;              // [T * k, hidden_bytes]: what FC1 leaves, in the form that `down` takes
  std::byte* shared_hidden = nullptr;       // [T, shared_hidden_bytes]
  int64_t hidden_bytes = 0, shared_hidden_bytes = 0;
  bool in_tiles = false, shared_in_tiles = false;  // whether routed experts, the shared one, may be multiplied in tiles
  std::byte* packed = nullptr;  // [slots, packed_bytes]: panels of FC1; only if some expert is multiplied in tiles
  int64_t packed_bytes = 0;
  PackTask* packs = nullptr;         // [slots / 16 + E + 1]; likewise
  Countdown* packs_left = nullptr;   // [E + 1]
  int32_t* order = nullptr;          // [E + 1] the active groups as FC1 takes them
  Countdown* logits_left = nullptr;  // [token blocks]
  Countdown* fc1_left = nullptr;     // [E + 1]
  std::byte* scratch[2] = {};        // [workers, scratch_bytes]: of up or down, and of gate beside up
  int64_t scratch_bytes[2] = {};
  float* scaled = nullptr;             // [workers, H]; only with weights_on_input
  std::byte* scaled_tokens = nullptr;  // [workers, chunk_of(scaled_bytes), scaled_bytes]; likewise
  int64_t scaled_bytes = 0;
  float* tile = nullptr;         // [workers, kTileFloats]
  float* scores = nullptr;       // [workers, 3 E]
  int32_t* group_ids = nullptr;  // [workers, E]
};

// Product of two sizes that are not negative; the largest int64 where it does not fit, which no workspace can have.
int64_t times(int64_t a, int64_t b);

// Cuts `memory`, of workspace_bytes(), into the buffers that the call needs; the others stay nullptr.
Workspace carve(void* memory, const Params& params, const KernelSet& kernels, const Call& call, int workers);

}  // namespace hina
