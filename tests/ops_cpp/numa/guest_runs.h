// Runs of a layer, judged by where the kernel says that its pages are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "../native/check.h"
#include "guest_cpus.h"
#include "guest_layers.h"
#include "moe/forward.h"
#include "moe/numa.h"
#include "numa/blocks.h"
#include "numa/layer.h"
#include "runtime/isa.h"

namespace guest {

// The nodes of pages, as the kernel tells them now.
class Nodes {
 public:
  int of(uintptr_t page) {
    const auto [found, is_new] = known_.try_emplace(page, -1);
    if (is_new) ask(page, found->second);
    return found->second;
  }

 private:
  static void ask(uintptr_t page, int& node) {
    void* address = reinterpret_cast<void*>(page * kPageBytes);
    CHECK(move_pages(1, &address, nullptr, &node) == 0 && node >= 0, "page %p: %d", address, node);
  }
  std::map<uintptr_t, int> known_;
};

struct Run {
  std::string text;       // what the library says about nodes
  double local = 0.0;     // the share of bytes of weights that a worker of their node read
  double possible = 0.0;  // the most that could be, as all CPUs read as much
  bool complete = false;  // every byte of the experts was read once
  double error = 0.0;     // relative L2 error against the plain plan, unless the layer is large
  double least = 0.0;     // what the worker read that read least: share of the mean
  int workers = 0;
};

inline std::vector<std::byte> forward_once(const Params& params, Call call, Cpus& cpus) {
  static const KernelSet kernels = select_kernels(choose_isa().isa);
  std::vector<std::byte> output(static_cast<size_t>(call.tokens * params.hidden_size * 4));
  call.output = output.data();
  const int64_t bytes = workspace_bytes(params, kernels, call, cpus.count());
  void* workspace = std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64));
  const std::string error = forward(params, kernels, call, workspace, cpus.count(), cpus.executor());
  CHECK(error.empty(), "%s", error.c_str());
  std::free(workspace);
  return output;
}

inline double distance(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  const auto* x = reinterpret_cast<const float*>(a.data());
  const auto* y = reinterpret_cast<const float*>(b.data());
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < a.size() / 4; ++i) difference += (x[i] - y[i]) * (x[i] - y[i]), norm += y[i] * y[i];
  return std::sqrt(difference / norm);
}

inline void judge_reads(const Reads& reads, const Topology& topology, const Cpus& cpus, int64_t expected, Run& run) {
  static Nodes nodes;
  nodes = Nodes();
  std::vector<int64_t> of_node(topology.workers.size()), of_worker(static_cast<size_t>(cpus.count()));
  int64_t local = 0, all = 0;
  CHECK(reads.count <= static_cast<int64_t>(reads.all.size()), "%ld reads", static_cast<long>(reads.count));
  for (const Read& read : reads.all.first(static_cast<size_t>(reads.count.load()))) {
    of_worker[static_cast<size_t>(read.worker)] += read.bytes;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(read.address), end = begin + static_cast<uintptr_t>(read.bytes);
    for (uintptr_t at = begin; at < end;) {
      const uintptr_t stop = std::min(end, (at / kPageBytes + 1) * kPageBytes);
      const int owner = topology.worker_of_node[static_cast<size_t>(nodes.of(at / kPageBytes))];
      const int64_t bytes = static_cast<int64_t>(stop - at);
      of_node[static_cast<size_t>(owner)] += bytes;
      local += owner == read.node ? bytes : 0;
      all += bytes;
      at = stop;
    }
  }
  run.local = static_cast<double>(local) / static_cast<double>(std::max<int64_t>(all, 1));
  run.complete = all == expected;
  run.least = static_cast<double>(*std::min_element(of_worker.begin(), of_worker.end())) * cpus.count() /
              static_cast<double>(std::max<int64_t>(all, 1));
  for (size_t n = 0; n < of_node.size(); ++n)
    run.possible += std::min(static_cast<double>(of_node[n]) / static_cast<double>(std::max<int64_t>(all, 1)),
                             cpus.share_of(static_cast<int>(n)));
}

// Every page of a node's copy is on that node.
inline void check_copies(const Call& call, const Topology& topology) {
  Nodes nodes;
  const std::vector<int> ids = topology.worker_ids();
  for (size_t n = 0; call.copies != nullptr && n < ids.size(); ++n) {
    const Params& copy = *call.copies[n];
    for (int64_t e = 0; e < expert_count(copy); ++e) {
      const std::span<const std::byte> data = blocks_of(copy, e).down.data();
      const uintptr_t begin = reinterpret_cast<uintptr_t>(data.data());
      for (uintptr_t at = begin; at < begin + data.size(); at += kPageBytes)
        CHECK(nodes.of(at / kPageBytes) == ids[n], "a page of the copy of node %d", ids[n]);
    }
  }
}

// Two tokens, which between them choose the experts [0, chosen), both as many.
inline Run run_layer(const Shape& s, Weights weights, const Layer& layer, NumaMode mode, int64_t chosen) {
  const Params& p = layer.params;
  const int64_t tokens = chosen > p.top_k ? 2 : 1;
  std::vector<float> hidden(static_cast<size_t>(tokens * p.hidden_size));
  std::mt19937 random(7);
  for (float& x : hidden) x = std::normal_distribution<float>()(random);
  std::vector<int64_t> ids(static_cast<size_t>(tokens * p.top_k));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i) % chosen;
  const std::vector<float> mixing(ids.size(), 0.5f);
  std::vector<Read> room(size_t{3} << 20, Read{nullptr, 0, -1, 0});
  Reads reads{.all = room};
  Call call;
  call.tokens = tokens;
  call.hidden_states = hidden.data();
  call.topk_ids = ids.data();
  call.topk_weights = mixing.data();

  LayerNuma numa(read_topology(), {mode, "HINA_NUMA", {}}, p);
  CHECK(numa.error().empty(), "%s", numa.error().c_str());
  Cpus cpus(numa.topology());
  Run run;
  run.workers = cpus.count();
  // Half of the time of the largest layers would go into this; theirs is a sum like those of the others.
  const bool compares = p.num_experts * expert_bytes(s, weights) <= kRoom;
  std::vector<std::byte> plain;
  if (compares) plain = forward_once(p, call, cpus);
  run.text = numa.look();
  if (run.text.empty()) run.text = numa.text();
  numa.apply(call);
  check_copies(call, numa.topology());
  call.reads = &reads;
  cpus.watch(&reads);
  const std::vector<std::byte> output = forward_once(p, call, cpus);
  run.error = compares ? distance(output, plain) : 0.0;
  judge_reads(reads, numa.topology(), cpus, std::min<int64_t>(chosen, tokens * p.top_k) * expert_bytes(s, weights),
              run);
  return run;
}

inline void print(const char* scenario, const Shape& s, Weights weights, const Run& run) {
  std::printf(
      "RESULT {\"scenario\": \"%s\", \"shape\": \"%s\", \"weights\": \"%s\", \"local\": %.4f, \"possible\": %.4f, "
      "\"complete\": %s, \"error\": %.3g, \"least\": %.3f, \"workers\": %d, \"text\": \"%s\"}\n",
      scenario, s.name, kWeightNames[static_cast<int>(weights)], run.local, run.possible,
      run.complete ? "true" : "false", run.error, run.least, run.workers, run.text.c_str());
}

}  // namespace guest
