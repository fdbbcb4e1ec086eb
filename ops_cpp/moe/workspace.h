// The memory of one call: every buffer that is written between routing and the output, cut from one allocation.
#pragma once

#include <atomic>
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

// The items of one node in one phase of a NumaPlan: `first` [active groups + 1] are those of the groups, in the order
// in which they are taken.
struct alignas(64) NodeQueue {
  std::atomic<int64_t> next{0};
  int64_t total = 0;
  int32_t* first = nullptr;

  int64_t left() const { return total - next.load(std::memory_order_relaxed); }
};

// Int8 tokens of one range of k of a NumaPlan, as tokens or panels of their own.
struct Parts {
  std::byte* base;
  int64_t bytes;  // of one token

  std::byte* of(int64_t index) const { return base + index * bytes; }
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

  // Only with a NumaPlan; windows, ranges and results are those of numa.h and partition.h:
  NodeQueue* queues = nullptr;               // [2, nodes]: of FC1 and FC2
  Countdown* fc1_items_left = nullptr;       // [E + 1, FC1 windows of an expert]
  Countdown* fc2_items_left = nullptr;       // [FC2 windows]
  float* fc1_results = nullptr;              // [slots, results]: of a group, all of up, then all of gate
  float* fc2_results = nullptr;              // [slots, results]
  float* joined = nullptr;                   // [workers, 2, rows of a window, 16]
  Parts* token_parts[kTokenFormCount] = {};  // [ranges] of [T] tokens; nullptr where there are none, as the others
  Parts* packed_parts = nullptr;             // [ranges] of [slots]
  Parts* hidden_parts[2] = {};               // [ranges] of [T * k] and, of the shared expert, [T]
  int32_t* node_of_worker = nullptr;         // [workers], as last seen; also with Call::copies or reads
};

// Product of two sizes that are not negative; the largest int64 where it does not fit, which no workspace can have.
int64_t times(int64_t a, int64_t b);

// The first piece of a call: none has more tokens. The plan by nodes is in it only if the call is computed by it.
Call first_piece(const Params& params, const KernelSet& kernels, const Call& call);

// Cuts `memory`, of workspace_bytes(), into the buffers that the call needs; the others stay nullptr.
Workspace carve(void* memory, const Params& params, const KernelSet& kernels, const Call& call, int workers);

}  // namespace hina
