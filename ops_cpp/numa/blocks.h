// The blocks of memory that an expert's weights lie in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "moe/params.h"

namespace hina {

// A matrix, or gate and up where their rows lie in turns: `rows` rows of `k` values.
struct Block {
  const Matrix* matrix;
  int64_t rows, k;

  // Each runs from the first row to the end of the last one; empty if there is none.
  std::span<const std::byte> data() const;
  std::span<const std::byte> scales() const;
  std::span<const std::byte> zero_points() const;
};

struct ExpertBlocks {
  std::vector<Block> first;  // gate and up, or both in one, or up alone
  Block down;
};

// Routed experts are counted 0..E-1; the shared one, if there is one, is E.
int64_t expert_count(const Params& params);
const Expert& expert_at(const Params& params, int64_t index);
ExpertBlocks blocks_of(const Params& params, int64_t index);

}  // namespace hina
