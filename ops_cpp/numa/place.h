// Where the weights of a layer's experts are, and how they are put elsewhere.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "moe/params.h"
#include "moe/placement.h"
#include "runtime/placement.h"
#include "runtime/topology.h"

namespace hina {

struct Placed {
  std::vector<ExpertPlacement> experts;  // [E], then the shared one; by worker nodes
  int blocks = 0;                        // of weights, see blocks.h
  int found = 0;                         // of these, in a pattern
  int absent = 0;                        // of the others, not in memory
  bool refused = false;                  // by the kernel
  std::string reason;                    // about the last one that was not found

  // The one node that everything found is on, or -1.
  int only_node() const;
};

// Asks about block after block, until more than `most_misses` of them are in no pattern.
Placed find_weights(const Params& params, const Topology& topology, int most_misses, MovePages move_pages);

// Moves one part of the pages of each block to each worker node; blocks of few pages stay where they are. Reads all
// weights, so that there are pages to move. Blocks whose pages did not all move are not `found`.
Placed spread_weights(const Params& params, const Topology& topology, MovePages move_pages);

int64_t block_count(const Params& params);

}  // namespace hina
