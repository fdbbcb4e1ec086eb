// Where the pages of a matrix are. Plain data: runtime/placement finds it out, moe/ cuts the work by it.
#pragma once

#include <cstdint>

namespace hina {

constexpr int kMaxNodes = 16;

// The byte at `origin + i`, 0 <= i, lies on the node order[(i / page_bytes) % count].
//   interleaved        page_bytes is the size of a page, order has each node once
//   bound in shards    page_bytes is the size of a shard
//   on one node        count is 1
// Nodes are numbered 0.. as runtime/topology lists them, which need not be the kernel's numbers.
struct Placement {
  int count = 0;  // of nodes in `order`; 0: not known
  int64_t page_bytes = 0;
  uintptr_t origin = 0;
  uint8_t order[kMaxNodes] = {};

  bool known() const { return count > 0; }
  int node_of(uintptr_t address) const {
    return order[(address - origin) / static_cast<uintptr_t>(page_bytes) % static_cast<uintptr_t>(count)];
  }
};

// Of the three matrices of an expert.
struct ExpertPlacement {
  Placement gate, up, down;
};

}  // namespace hina
