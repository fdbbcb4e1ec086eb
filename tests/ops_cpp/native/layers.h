// Random layers, calls of them, and threads to run them on.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "kernels/convert/scalar.h"
#include "moe/forward.h"
#include "runtime/amx.h"
#include "runtime/isa.h"

using namespace hina;

namespace {

std::mt19937 g_random(11);

int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(g_random); }
float normal() { return std::normal_distribution<float>()(g_random); }

float value_of(DataType type, const std::byte* data, int64_t i) {
  return type == DataType::kFloat32   ? load<DataType::kFloat32>(data, i)
         : type == DataType::kFloat16 ? load<DataType::kFloat16>(data, i)
                                      : load<DataType::kBFloat16>(data, i);
}

struct Buffers {
  std::vector<std::unique_ptr<std::byte[]>> all;

  std::byte* filled(int64_t count, DataType type, float scale = 1.0f) {
    const int64_t size = type == DataType::kFloat32 ? 4 : 2;
    all.push_back(std::make_unique<std::byte[]>(static_cast<size_t>(count * size)));
    std::byte* data = all.back().get();
    for (int64_t i = 0; i < count; ++i) {
      const float value = normal() * scale;
      if (type == DataType::kFloat32) store<DataType::kFloat32>(data, i, value);
      if (type == DataType::kFloat16) store<DataType::kFloat16>(data, i, value);
      if (type == DataType::kBFloat16) store<DataType::kBFloat16>(data, i, value);
    }
    return data;
  }

  std::byte* bytes(int64_t count) {
    all.push_back(std::make_unique<std::byte[]>(static_cast<size_t>(count)));
    for (int64_t i = 0; i < count; ++i) all.back()[i] = static_cast<std::byte>(g_random());
    return all.back().get();
  }

  // Random codes, scales and zero points; rows end with their last block, or with their last value.
  Matrix quantised(int64_t rows, int64_t cols, WeightFormat format, int64_t block, bool zero_points) {
    const bool by4 = format == WeightFormat::kInt4 || format == WeightFormat::kMxfp4;
    const int64_t blocks = block == 0 ? 1 : (cols + block - 1) / block;
    Matrix m;
    m.format = format;
    m.block = block;
    m.row_bytes = ((block == 0 ? cols : blocks * block) + by4) / (1 + by4);
    m.row_stride = m.row_bytes;
    m.data = bytes(rows * m.row_stride);
    if (format == WeightFormat::kMxfp4) {
      m.scale_type = DataType::kE8M0;
      m.scale_stride = blocks;
      std::byte* scales = bytes(rows * blocks);
      for (int64_t i = 0; i < rows * blocks; ++i) scales[i] = static_cast<std::byte>(pick(118, 124));
      m.scales = scales;
      return m;
    }
    m.scale_type = static_cast<DataType>(pick(0, 2));
    m.scale_stride = blocks * (m.scale_type == DataType::kFloat32 ? 4 : 2);
    m.scales = filled(rows * blocks, m.scale_type, (by4 ? 0.2f : 0.01f) / std::sqrt(static_cast<float>(cols)));
    if (!zero_points) return m;
    m.zero_point_type = by4 ? DataType::kUint4 : format == WeightFormat::kInt8 ? DataType::kInt8 : DataType::kUint8;
    m.zero_point_stride = by4 ? (blocks + 1) / 2 : blocks;
    m.zero_points = bytes(rows * m.zero_point_stride);
    return m;
  }

  Matrix matrix(int64_t rows, int64_t cols) { return matrix(rows, cols, static_cast<DataType>(pick(0, 2))); }

  Matrix matrix(int64_t rows, int64_t cols, DataType type) {
    return {filled(rows * cols, type, 1.0f / std::sqrt(static_cast<float>(cols))),
            cols * (type == DataType::kFloat32 ? 4 : 2), type};
  }
};

std::vector<float> bias(int64_t n) {
  std::vector<float> values(pick(0, 1) ? static_cast<size_t>(n) : 0);
  for (float& v : values) v = normal();
  return values;
}

// How one projection of all experts is stored.
struct Storage {
  WeightFormat format = static_cast<WeightFormat>(std::max<int64_t>(0, pick(-2, kWeightFormatCount - 1)));
  int64_t block = format == WeightFormat::kMxfp4 ? 32 : pick(0, 1) ? 32 : pick(0, 1) ? 0 : 16 << pick(0, 4);
  bool zero_points = pick(0, 1);
  DataType type = static_cast<DataType>(pick(0, 2));  // of plain weights; sometimes each expert has its own

  Matrix make(Buffers& buffers, int64_t rows, int64_t cols) const {
    if (format == WeightFormat::kFloat && pick(0, 99) == 0) return buffers.matrix(rows, cols);
    if (format == WeightFormat::kFloat) return buffers.matrix(rows, cols, type);
    return buffers.quantised(rows, cols, format, block, zero_points);
  }
};

// Every other row of a matrix, from row `first` on.
Matrix half_of(Matrix m, int64_t first) {
  m.data += first * m.row_stride;
  m.row_stride *= 2;
  if (!m.quantised()) return m;
  m.scales += first * m.scale_stride;
  m.scale_stride *= 2;
  if (m.zero_points == nullptr) return m;
  m.zero_points += first * m.zero_point_stride;
  m.zero_point_stride *= 2;
  return m;
}

struct ExpertStorage {
  Storage gate, up, down;
  bool in_turns = pick(0, 1), up_first = pick(0, 1);

  Expert make(Buffers& buffers, int64_t hidden, int64_t size, bool gated) const {
    Expert e;
    if (gated && in_turns) {
      e.gate_up = gate.make(buffers, 2 * size, hidden);
      e.gate = half_of(e.gate_up, up_first), e.up = half_of(e.gate_up, !up_first);
    } else {
      if (gated) e.gate = gate.make(buffers, size, hidden);
      e.up = up.make(buffers, size, hidden);
    }
    if (gated) e.gate_bias = bias(size);
    e.up_bias = bias(size);
    e.down = down.make(buffers, hidden, size), e.down_bias = bias(hidden);
    return e;
  }
};

// Sizes are up to `scale` times 80.
Params random_layer(Buffers& buffers, int64_t scale = 1) {
  Params p;
  p.hidden_size = pick(1, 80 * scale);
  p.intermediate_size = pick(1, 70 * scale);
  const int64_t groups = pick(1, 3);
  p.num_experts = groups * pick(1, 30);
  p.top_k = pick(1, std::min<int64_t>(p.num_experts, 6));
  p.gated = pick(0, 3) > 0;
  p.weights_on_input = pick(0, 3) == 0;
  p.activation = static_cast<Activation>(pick(0, kActivationCount - 1));
  p.router.input = static_cast<RouterInput>(pick(0, 2));
  p.router.score_func = static_cast<ScoreFunc>(pick(0, 4));
  if (p.router.score_func == ScoreFunc::kSparsemixer) {
    if (p.num_experts < 2)
      p.router.score_func = ScoreFunc::kSoftmax;
    else
      p.top_k = 2;
  }
  if (p.router.score_func == ScoreFunc::kSoftmax || p.router.score_func == ScoreFunc::kSigmoid) {
    p.router.n_group = groups;
    p.router.topk_group = pick(1, groups);
    p.router.group_score = static_cast<GroupScore>(pick(0, 1));
  }
  p.router.mix_from_selection = false;
  p.router.norm_topk_prob = pick(0, 1);
  p.router.ties_to_highest = pick(0, 1);
  p.router.weight = buffers.matrix(p.num_experts, p.hidden_size);
  p.router.bias = bias(p.num_experts);
  p.router.correction = bias(p.num_experts);
  p.int8_activations = pick(0, 1);
  ExpertStorage storage;
  if (pick(0, 1)) storage.up.type = storage.gate.type = storage.down.type = DataType::kBFloat16;
  for (int64_t e = 0; e < p.num_experts; ++e)
    p.experts.push_back(storage.make(buffers, p.hidden_size, p.intermediate_size, p.gated));
  if (pick(0, 2) == 0) {
    p.shared_intermediate_size = pick(1, 90 * scale);
    p.shared_gated = pick(0, 1);
    p.shared = ExpertStorage().make(buffers, p.hidden_size, p.shared_intermediate_size, p.shared_gated);
    if (pick(0, 1)) p.shared_gate = buffers.matrix(1, p.hidden_size);
  }
  return p;
}

struct Threads {
  int count;
  int (*node)() = nullptr;
};

void parallel_for(void* self, void (*fn)(void*, size_t), size_t total, void* data) {
  std::atomic<size_t> next{0};
  const auto drain = [&] {
    for (size_t i; (i = next++) < total;) fn(data, i);
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < static_cast<Threads*>(self)->count; ++i) threads.emplace_back(drain);
  drain();
  for (std::thread& thread : threads) thread.join();
}

int node_of_thread(void* self) { return static_cast<Threads*>(self)->node(); }

std::string run(const Params& p, const KernelSet& kernels, Call call, Threads pool, std::vector<std::byte>& output,
                std::vector<int64_t>& counts) {
  constexpr int kWorkers = 8;
  call.output = output.data();
  call.tokens_per_expert = counts.data();
  const int64_t bytes = workspace_bytes(p, kernels, call, kWorkers);
  CHECK(bytes >= 0, "workspace");
  std::unique_ptr<void, void (*)(void*)> workspace(
      std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64 + 64)), std::free);
  std::memset(workspace.get(), 0xff, static_cast<size_t>(bytes));  // NaN, and ids of -1
  return forward(p, kernels, call, workspace.get(), kWorkers,
                 {&pool, parallel_for, pool.node == nullptr ? nullptr : node_of_thread});
}

// Kernels of this CPU with those of tiles: portable ones or, where AMX can be used, those of AMX. Those of bfloat16 are
// used for any number of tokens, or results would depend on the batch.
KernelSet with_tiles() {
  KernelSet kernels = select_kernels(choose_isa().isa, amx_status().usable);
  if (!kernels.amx || pick(0, 1)) {
    const KernelSet portable = select_kernels(Isa::kPortable, true);
    std::copy_n(portable.tile_bf16, kTileTerms, kernels.tile_bf16);
    std::copy_n(portable.tile_int8, kWeightFormatCount, kernels.tile_int8);
  }
  for (TileKernel& kernel : kernels.tile_bf16) kernel.from_tokens = 1;
  kernels.tiles_round_weights = pick(0, 1);
  return kernels;
}

// With all that a router may read; `ids` is where the experts' ids lie.
Call random_call(Buffers& buffers, const Params& p, int64_t tokens, std::vector<int64_t>& ids) {
  Call call;
  call.tokens = tokens;
  call.type = static_cast<DataType>(pick(0, 2));
  call.hidden_states = buffers.filled(tokens * p.hidden_size, call.type);
  call.router_logits = buffers.filled(tokens * p.num_experts, DataType::kFloat32);
  call.topk_weights = buffers.filled(tokens * p.top_k, DataType::kFloat32);
  ids.resize(static_cast<size_t>(tokens * p.top_k));
  for (int64_t& id : ids) id = pick(0, p.num_experts - 1);
  call.topk_ids = ids.data();
  return call;
}

}  // namespace
