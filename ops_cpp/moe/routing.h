// From the logits of one token to its k experts and their mixing weights; the formulas are those of
// graph_passes/reference.py, computed in float32.
#pragma once

#include "kernels/route/route.h"
#include "moe/params.h"

namespace hina {

// Room to work in, for a layer of E experts.
struct RouteScratch {
  float* scores;       // [3 * E]
  int32_t* group_ids;  // [E]
};

// Writes `top_k` ids, best first, and weights. `logits` [num_experts] is not changed. Ids are always in
// [0, num_experts), whatever the logits hold: NaN counts as larger than any number.
void route_token(const RouteKernel& kernels, const Router& router, int64_t num_experts, int64_t top_k,
                 const float* logits, const RouteScratch& scratch, int32_t* ids, float* weights);

}  // namespace hina
