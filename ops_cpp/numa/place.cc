#include "numa/place.h"

#include <algorithm>

#include "numa/blocks.h"

namespace hina {
namespace {

constexpr size_t kBatch = 4096;  // pages that are moved at a time

// The pages of a block in as many parts as there are nodes; not known where there are fewer than two pages for each.
Placement in_parts(std::span<const std::byte> data, int nodes, int64_t page_bytes) {
  Placement placement;
  const uintptr_t page = static_cast<uintptr_t>(page_bytes);
  const uintptr_t first = reinterpret_cast<uintptr_t>(data.data()) / page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data.data() + data.size()) + page - 1) / page;
  const uintptr_t count = static_cast<uintptr_t>(nodes);
  if (end - first < 2 * count) return placement;
  placement.origin = first * page;
  placement.page_bytes = static_cast<int64_t>((end - first + count - 1) / count * page);
  for (int node = 0; node < nodes; ++node) placement.order[node] = static_cast<uint8_t>(node);
  placement.count = nodes;
  return placement;
}

struct Moved {
  size_t pages = 0;
  size_t there = 0;  // where they shall be
  int error = 0;     // of the kernel
};

Moved move(std::span<const std::byte> data, const Placement& placement, const Topology& topology,
           MovePages move_pages) {
  const uintptr_t page = static_cast<uintptr_t>(topology.page_bytes);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data.data()), end = begin + data.size();
  const std::vector<int> ids = topology.worker_ids();
  Moved moved;
  for (uintptr_t at = placement.origin; at < end;) {
    std::vector<void*> batch;
    std::vector<int> nodes;
    for (; at < end && batch.size() < kBatch; at += page) {
      static_cast<void>(*reinterpret_cast<const volatile char*>(std::max(at, begin)));
      batch.push_back(reinterpret_cast<void*>(at));
      nodes.push_back(ids[static_cast<size_t>(placement.node_of(at))]);
    }
    std::vector<int> status(batch.size(), -1);
    moved.error = move_pages(batch.size(), batch.data(), nodes.data(), status.data());
    if (moved.error != 0) return moved;
    moved.pages += batch.size();
    for (size_t i = 0; i < batch.size(); ++i) moved.there += status[i] == nodes[i];
  }
  return moved;
}

// Calls fn(block), which returns whether to go on, for each block, and gives the placement that it returns to those
// of the block's matrices.
template <typename Fn>
Placed place(const Params& params, Fn fn) {
  Placed placed;
  placed.experts.resize(static_cast<size_t>(expert_count(params)));
  for (int64_t e = 0; e < expert_count(params); ++e) {
    const Expert& expert = expert_at(params, e);
    ExpertPlacement& to = placed.experts[static_cast<size_t>(e)];
    ExpertBlocks blocks = blocks_of(params, e);
    blocks.first.push_back(blocks.down);
    for (const Block& block : blocks.first) {
      Placement placement;
      ++placed.blocks;
      if (!fn(block, placed, placement)) return placed;
      placed.found += placement.known();
      if (block.matrix == &expert.gate_up)
        to.gate = to.up = placement;
      else
        (block.matrix == &expert.gate ? to.gate : block.matrix == &expert.up ? to.up : to.down) = placement;
    }
  }
  return placed;
}

}  // namespace

int Placed::only_node() const {
  int only = -1;
  for (const ExpertPlacement& expert : experts)
    for (const Placement* placement : {&expert.gate, &expert.up, &expert.down})
      for (int i = 0; i < placement->count; ++i) {
        if (only >= 0 && placement->order[i] != only) return -1;
        only = placement->order[i];
      }
  return only;
}

int64_t block_count(const Params& params) {
  int64_t count = 0;
  for (int64_t e = 0; e < expert_count(params); ++e)
    count += static_cast<int64_t>(blocks_of(params, e).first.size()) + 1;
  return count;
}

Placed find_weights(const Params& params, const Topology& topology, int most_misses, MovePages move_pages) {
  return place(params, [&](const Block& block, Placed& placed, Placement& placement) {
    const Found found = find_placement(block.data().data(), static_cast<int64_t>(block.data().size()),
                                       topology.page_bytes, topology.worker_of_node, move_pages);
    placement = found.placement;
    placed.refused = found.pattern == Pattern::kRefused;
    placed.absent += found.pattern == Pattern::kNotResident;
    if (!placement.known()) placed.reason = found.reason;
    const int misses = placed.blocks - placed.found - placement.known();
    return !placed.refused && misses <= most_misses;
  });
}

Placed spread_weights(const Params& params, const Topology& topology, MovePages move_pages) {
  const int nodes = static_cast<int>(topology.workers.size());
  return place(params, [&](const Block& block, Placed& placed, Placement& placement) {
    const Placement wanted = in_parts(block.data(), nodes, topology.page_bytes);
    if (!wanted.known()) {
      placed.reason = "a matrix has too few pages";
      return true;
    }
    const Moved moved = move(block.data(), wanted, topology, move_pages);
    if (moved.error != 0) {
      placed.refused = true;
      placed.reason = refusal("move_pages", moved.error);
      return false;
    }
    if (moved.there * 20 >= moved.pages * 19)
      placement = wanted;
    else
      placed.reason = std::to_string(moved.pages - moved.there) + " of " + std::to_string(moved.pages) +
                      " pages of a matrix did not move";
    return true;
  });
}

}  // namespace hina
