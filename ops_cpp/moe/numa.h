// How the experts of one layer are cut by the nodes that own the pages of their weights: made once, only read then.
//
// Where no row is cut along k (`segments`), results are the bits of the plain plan. Else the sums of cut rows are added
// up in another order; results are the same bits for any workers, threads, nodes of the threads and for any batch that
// is not too large for the plan.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "moe/params.h"
#include "moe/partition.h"
#include "moe/placement.h"

namespace hina {

// What experts share: the partitions of one phase have windows of as many rows, and the ranges of k of their items
// are numbered.
enum Phase { kFc1, kFc2, kSharedFc2 };
constexpr int kPhases = 3;

struct KRange {
  int64_t from, to;
  int64_t size() const { return to - from; }
};

struct ExpertPartition {
  const Partition* gate = nullptr;  // nullptr without a gate
  const Partition* up = nullptr;
  const Partition* down = nullptr;
};

struct NumaPlan {
  int nodes = 0;
  bool segments = false;
  double locality = 0.0;                     // the share of bytes that are read by their node, but for scales
  std::vector<KRange> ranges[kPhases];       // the first one is all of k
  int64_t fc1_results = 0, fc2_results = 0;  // of one token of one expert, at most
  int64_t most_window = 0;                   // rows
  int64_t most_fc1_windows = 0;              // of an expert
  std::vector<ExpertPartition> experts;      // [E], then that of the shared expert if there is one
  std::vector<std::unique_ptr<const Partition>> partitions;
};

// Bytes of weights of an item, at least, on the average of a layer. To begin an item, and to add up what it leaves,
// takes 0.7 us (measured 2026-11-30 with items of 2 to 18 KiB). A core reads 10 GB/s of its node's memory, and let a
// remote byte take 1.75 times as long: then of 2 nodes, where the plain plan reads half of the bytes remotely, 16 KiB
// take 2.2 us instead of 1.6.
constexpr int64_t kLeastItemBytes = 16 * 1024;

// `experts` are the placements of the E experts, then of the shared one if there is one; nodes are 0 .. nodes - 1.
// nullptr, for the plain plan, where all pages are on one node, where items would have less than `least_item_bytes`, or
// where rows would be cut in too many ways.
std::unique_ptr<const NumaPlan> make_numa_plan(const Params& params, int nodes,
                                               std::span<const ExpertPlacement> experts,
                                               int64_t least_item_bytes = kLeastItemBytes);

// Whether a piece of `tokens` tokens is computed by the plan: the results of all items must fit into memory, and the
// layer must be bound by reading weights.
bool uses_numa(const NumaPlan* plan, const Params& params, int64_t tokens);

// What workers read, for tests: bytes of weights that lie one after the other, read by one worker in one task.
struct Read {
  const void* address;
  int64_t bytes;
  int worker;
  int node;  // the worker's when it took the task
};
struct Reads {
  std::span<Read> all;
  std::atomic<int64_t> count{0};  // beyond all.size() they are only counted

  void add(const Read& read) {
    const auto at = static_cast<size_t>(count.fetch_add(1, std::memory_order_relaxed));
    if (at < all.size()) all[at] = read;
  }
};

}  // namespace hina
