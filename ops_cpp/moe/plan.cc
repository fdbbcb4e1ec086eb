#include "moe/plan.h"

#include <algorithm>

namespace hina {

int64_t slot_count(const Params& params, int64_t tokens) {
  return tokens * (params.top_k + (params.shared_intermediate_size > 0 ? 1 : 0));
}

void make_plan(const Params& params, int64_t tokens, const int32_t* ids, const float* weights,
               const float* shared_weights, Plan& plan) {
  const int64_t experts = params.num_experts;
  const int64_t routed = tokens * params.top_k;
  std::fill(plan.first.begin(), plan.first.end(), 0);
  for (int64_t i = 0; i < routed; ++i) ++plan.first[ids[i] + 1];
  for (int64_t e = 0; e < experts; ++e) plan.first[e + 1] += plan.first[e];

  // first[e] serves as the next free slot of expert e and afterwards holds the end of its group: shift back.
  for (int64_t i = 0; i < routed; ++i) {
    const int64_t slot = plan.first[ids[i]]++;
    plan.token[slot] = static_cast<int32_t>(i / params.top_k);
    plan.weight[slot] = weights[i];
  }
  for (int64_t e = experts; e > 0; --e) plan.first[e] = plan.first[e - 1];
  plan.first[0] = 0;

  plan.first[experts + 1] = slot_count(params, tokens);
  for (int64_t slot = routed; slot < plan.first[experts + 1]; ++slot) {
    plan.token[slot] = static_cast<int32_t>(slot - routed);
    plan.weight[slot] = shared_weights[slot - routed];
  }
  size_t n = 0;
  for (int64_t g = 0; g <= experts; ++g)
    if (plan.first[g + 1] > plan.first[g]) plan.active[n++] = static_cast<int32_t>(g);
  plan.active = plan.active.first(n);
}

}  // namespace hina
