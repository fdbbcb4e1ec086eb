// One piece of a call of one MoE layer while it runs: what its workers share. forward.cc says how the work is cut;
// prepare.cc, experts.cc and tiles.cc do it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "moe/blocking.h"
#include "moe/factors.h"
#include "moe/forward.h"
#include "moe/numa.h"
#include "moe/projection.h"
#include "moe/tile_rows.h"
#include "moe/workspace.h"

namespace hina {

inline int64_t size_of(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

class Layer {
 public:
  Layer(const Params& params, const KernelSet& kernels, const Call& call, const Workspace& workspace, int workers,
        const Executor& executor);

  // What one worker does, start to end.
  void work(size_t worker);

  // Empty, or what is wrong with topk_ids; this piece begins at the token `begin` of the call.
  std::string error(int64_t begin) const;

 private:
  // One kind of expert, routed or shared.
  struct Kind {
    int64_t size;  // I or S
    bool gated;
    int64_t task_rows = 0;  // of each matrix in a task
    int64_t fc1_tasks = 0;  // of one group
  };

  // The rows of FC1 are read as two blocks of as many rows. They are those of up and of gate; or, where these lie in
  // turns, the two halves of the rows of both, so that what is read is one run of bytes.
  struct Fc1Blocks {
    RowBlock parts[2];
    bool in_turns;
  };

  int64_t raw_id(int64_t index) const;
  TokenForm form(const Matrix& matrix) const { return token_form(matrix, p_.int8_activations, kernels_, call_.type); }
  const Expert& expert_of(int64_t group) const { return group == p_.num_experts ? p_.shared : p_.experts[group]; }
  // The copy of it that the worker reads.
  const Expert& expert_of(int64_t group, size_t worker) const {
    if (call_.copies == nullptr) return expert_of(group);
    const Params& mine = *call_.copies[w_.node_of_worker[worker]];
    return group == p_.num_experts ? mine.shared : mine.experts[group];
  }
  const Kind& kind_of(int64_t group) const { return group == p_.num_experts ? shared_ : routed_; }
  int64_t tokens_of(int64_t group) const { return w_.plan.first[group + 1] - w_.plan.first[group]; }
  bool is_scaled(const Kind& kind) const { return p_.weights_on_input && &kind != &shared_; }
  std::byte* scratch_of(size_t worker, int which) const;
  float* tile_of(size_t worker) const { return w_.tile + static_cast<int64_t>(worker) * kTileFloats; }
  std::byte* hidden_of(const Kind& kind, int64_t slot) const;

  // prepare.cc
  void widen_tokens(int64_t begin, int64_t end);
  void quantise_tokens(int64_t begin, int64_t end, int64_t step);
  void quantise(TokenForm form, const float* x, int64_t from, int64_t to, int64_t k, void* token) const;
  void prepare(int64_t task, size_t worker);
  void choose(int64_t token, size_t worker);
  float shared_weight(int64_t token) const;
  void plan();
  void order_groups();
  void cut_tasks();

  // experts.cc
  void fc1(int64_t task, size_t worker);
  int64_t group_of(int64_t task) const;
  static Fc1Blocks fc1_blocks(const Expert& expert, int64_t first, int64_t last);
  int64_t fc1_step(int64_t group, const Expert& expert, const Kind& kind) const;
  void fc1_rows_of(int64_t group, const Expert& expert, const Kind& kind, int64_t first, int64_t last,
                   const RowBlock& next, size_t worker);
  void gather(TokenForm form, int64_t slot, int n, const void** tokens) const;
  void gather_scaled(TokenForm form, const KRange& range, int64_t slot, int n, size_t worker,
                     const void** tokens) const;
  void store_token(TokenForm form, const float* x, int64_t from, int64_t to, int64_t k, std::byte* token) const;
  void finish_token(int64_t group, int64_t first, int64_t last, int64_t slot, float* up, float* gate) const;
  void fc2(int64_t task, size_t worker);
  void fc2_rows_of(int32_t group, const Expert& expert, const Kind& kind, int64_t first, int64_t last,
                   const RowBlock& next, size_t worker);
  void add_token(int64_t group, int64_t first, int64_t rows, int64_t slot, float* values);
  void begin_output(int64_t first, int64_t rows);
  void end_output(int64_t first, int64_t rows);

  // tiles.cc
  ExpertTiles tiles_of(int64_t group) const;
  void cut_packs();
  void pack(int64_t task);
  const void* packed_of(const ExpertTiles& tiles, int64_t group, int64_t slot) const;
  void fc1_in_tiles(int64_t group, const ExpertTiles& tiles, int64_t first, int64_t last, size_t worker);
  void activate(int64_t group, const ExpertTiles& tiles, int64_t first, int64_t rows, int64_t slot, int n,
                bool in_turns, float* values) const;
  void fc2_in_tiles(int64_t group, const ExpertTiles& tiles, int64_t first, int64_t last, size_t worker);
  void add_panel(int64_t group, int64_t first, int64_t rows, int64_t slot, int n, float* values);

  // placed.cc
  struct Product {  // of an item with the tokens of a group
    Phase phase;    // kFc1 or kFc2
    int64_t group;
    bool is_gate;
    const Matrix* matrix;
    const Partition* partition;
    const Item* item;
    float* results;  // of the group and the matrix

    float* out(int64_t tokens) const { return results + item->at * tokens; }
  };
  void quantise_parts(int64_t token);
  void pack_parts(int64_t task);
  void store_parts(int64_t group, int64_t first, int64_t rows, int64_t slot, int n, const float* values) const;
  void plan_by_nodes();
  int see_node(size_t worker);
  void work_by_nodes(size_t worker);
  void serve(Phase phase, size_t worker);
  Product product_of(Phase phase, const NodeQueue& queue, int node, int64_t index) const;
  float* results_of(Phase phase, int64_t group) const;
  float* gate_results(int64_t group) const;
  void multiply(const Product& product, size_t worker);
  void multiply_by_vectors(const Product& product, const Matrix& part, size_t worker);
  void multiply_in_tiles(const Product& product, const ExpertTiles& tiles, const Matrix& part, size_t worker);
  void gather_part(const Product& product, TokenForm form, int64_t slot, int n, size_t worker,
                   const void** tokens) const;
  const void* panel_part(const Product& product, const ExpertTiles& tiles, int64_t slot, int n) const;
  void join_fc1(int64_t group, int64_t window, size_t worker);
  void join_fc2(int64_t window, size_t worker);
  Countdown& fc1_items_left(int64_t group, int64_t window) const;
  const Parts* hidden_parts(const Kind& kind) const { return w_.hidden_parts[&kind == &shared_]; }
  // Of the slots whose hidden values lie in the kind's own buffers.
  int64_t first_slot(const Kind& kind) const { return &kind == &shared_ ? call_.tokens * p_.top_k : 0; }
  int64_t values_of_row(const Product& product) const {
    return product.phase == kFc1 ? p_.hidden_size : kind_of(product.group).size;
  }
  float* joined_of(size_t worker) const {
    return w_.joined + static_cast<int64_t>(worker) * 2 * call_.numa->most_window * kPanelTokens;
  }
  void record(const Matrix& matrix, int64_t k, int64_t first, int64_t last, size_t worker) const {
    if (call_.reads != nullptr) record_part(columns_of(matrix, 0, k, k), first, last, worker);
  }
  void record_part(const Matrix& part, int64_t first, int64_t last, size_t worker) const;

  const Params& p_;
  const KernelSet& kernels_;
  const Call& call_;
  Workspace w_;
  const Executor& executor_;
  Kind routed_{}, shared_{};
  const float* x_;
  float* sum_;
  int workers_;
  int64_t token_blocks_, router_rows_, prepare_tasks_;
  // By plan(), read after unplanned_:
  int64_t routed_groups_ = 0, pack_tasks_ = 0, fc1_tasks_ = 0, fc2_tasks_ = 0, fc2_task_rows_ = 0;
  int64_t bad_id_ = -1;  // likewise: position of the first id out of range
  Countdown blocks_left_, unplanned_;
  std::atomic<int64_t> next_prepare_{0}, next_pack_{0}, next_fc1_{0}, next_fc2_{0};
};

// Adds a bias to `rows` rows of `n` values each.
void add_bias(float* values, int64_t rows, int64_t n, const std::vector<float>& bias, int64_t first);

// From 2 `rows` rows of gate and up in turns, of `n` values each, to those of up, then those of gate.
void take_turns(float* values, int64_t rows, int64_t n, bool gate_first);

}  // namespace hina
