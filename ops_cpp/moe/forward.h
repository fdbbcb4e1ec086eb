// One MoE layer: route, group the tokens by expert, run the experts, combine. One parallel region, no barrier; only so
// many tokens that their intermediate values would need too much memory are computed in several pieces, one by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/dispatch.h"
#include "moe/params.h"
#include "runtime/executor.h"

namespace hina {

struct NumaPlan;
struct Reads;

// Tensors of one call; all contiguous, at any address. T tokens; which router tensors are read follows from
// Router::input.
struct Call {
  int64_t tokens = 0;
  const void* hidden_states = nullptr;  // [T, H]
  void* output = nullptr;               // [T, H], same type
  DataType type = DataType::kFloat32;   // of hidden_states and output
  const void* router_logits = nullptr;  // [T, E]
  DataType router_logits_type = DataType::kFloat32;
  const void* topk_ids = nullptr;  // [T, k], int64 or int32
  bool topk_ids_are_int64 = true;
  const void* topk_weights = nullptr;  // [T, k]
  DataType topk_weights_type = DataType::kFloat32;
  int64_t* tokens_per_expert = nullptr;  // [E] or nullptr
  int64_t tokens_at_once = 0;            // of a piece; 0: as the memory for intermediate values allows
  const NumaPlan* numa = nullptr;  // cuts the work by the nodes that own the pages (numa.h); nullptr: the plain plan
  const Params* const* copies = nullptr;  // [nodes] the same layer with the experts' weights as each node has them, or
                                          // nullptr; not together with `numa`
  Reads* reads = nullptr;                 // where what is read is recorded, for tests
};

// Upper bound of the tasks that can run at once for `tokens` tokens: more workers than that find nothing to do.
int64_t most_tasks(const Params& params, int64_t tokens);

// Tokens of a piece of the call.
int64_t tokens_at_once(const Params& params, const KernelSet& kernels, const Call& call);

// Bytes of workspace for one call with up to `workers` concurrent workers; -1 if that does not fit in 63 bits.
int64_t workspace_bytes(const Params& params, const KernelSet& kernels, const Call& call, int workers);

// Runs the layer. `workspace` is 64-byte aligned, of workspace_bytes(). Returns an empty string, or what is wrong with
// topk_ids. The output is the same bits for any number of workers, threads and pieces.
std::string forward(const Params& params, const KernelSet& kernels, const Call& call, void* workspace, int workers,
                    const Executor& executor);

}  // namespace hina
