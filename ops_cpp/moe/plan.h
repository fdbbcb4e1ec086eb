// The order of the routed tokens: slots grouped by expert, each group in token order.
#pragma once

#include <cstdint>
#include <span>

#include "moe/params.h"

namespace hina {

// A slot is one (token, expert) pair. Slots of routed experts fill [0, T * k); with a shared expert another T follow,
// in token order, as group E.
struct Plan {
  std::span<int64_t> first;   // [E + 2] first slot of each group; first[g + 1] ends group g
  std::span<int32_t> token;   // [slots]
  std::span<float> weight;    // [slots] mixing weight
  std::span<int32_t> active;  // groups with at least one slot, ascending
};

// Number of slots of T tokens; the caller has checked that it fits.
int64_t slot_count(const Params& params, int64_t tokens);

// Fills `plan` from `ids` and `weights` [T, k]; `shared_weights` [T] is read only with a shared expert. Every id must
// be in [0, E).
void make_plan(const Params& params, int64_t tokens, const int32_t* ids, const float* weights,
               const float* shared_weights, Plan& plan);

}  // namespace hina
