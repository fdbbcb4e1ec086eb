// The memory of one call: every buffer that is written between routing and the output, cut from one allocation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/forward.h"
#include "moe/plan.h"
#include "runtime/countdown.h"

namespace hina {

struct Workspace {
  float* x = nullptr;               // [T, H]; not taken when hidden_states is float32
  float* sum = nullptr;             // [T, H]; not taken when the output is float32
  float* logits = nullptr;          // [T, E]
  int32_t* ids = nullptr;           // [T, k]
  float* weights = nullptr;         // [T, k]
  float* shared_weights = nullptr;  // [T]
  Plan plan;
  float* hidden = nullptr;           // [T * k, I]
  float* shared_hidden = nullptr;    // [T, S]
  Countdown* logits_left = nullptr;  // [token blocks]
  Countdown* fc1_left = nullptr;     // [E + 1]
  float* rows = nullptr;             // [workers, kRows, longest row]; only where 16-bit rows are converted by the block
  float* scaled = nullptr;           // [workers, chunk, H]; only with weights_on_input
  float* tile = nullptr;             // [workers, kMaxChunk, kRows]
  float* scores = nullptr;           // [workers, 3 E]
  int32_t* group_ids = nullptr;      // [workers, E]
};

// Room for the float32 copy of one block of rows.
int64_t block_floats(const Params& params);

// Product of two sizes that are not negative; the largest int64 where it does not fit, which no workspace can have.
int64_t times(int64_t a, int64_t b);

// Cuts `memory`, of workspace_bytes(), into the buffers that the call needs; the others stay nullptr.
Workspace carve(void* memory, const Params& params, const Call& call, int workers);

}  // namespace hina
