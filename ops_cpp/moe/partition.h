// Which rows, and which part of each row, of one matrix each node reads, so that nearly all bytes are of its own pages.
// Pure arithmetic on addresses.
//
// The rows are cut into windows. Rows of one window that have the same owner make items: rows n, n + s, n + 2 s .. are
// alike when s rows are a multiple of all nodes' pages, so that an item is runs of rows at a constant distance. A row
// whose pages belong to several nodes is cut along k near the ends of pages, or given to the node that has most of it.
// Cuts lie on a grid, the coarsest on which kLeastLocal of the bytes are local: the coarser it is, the fewer rows are
// cut and the more rows are cut alike.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/placement.h"

namespace hina {

constexpr double kLeastLocal = 0.96;

// A matrix as the partition sees it: `rows` rows of `k` values, of `bits` each, `row_stride` bytes apart. Rows may be
// cut at multiples of `unit` values, whose bytes are whole.
struct MatrixShape {
  uintptr_t data = 0;
  int64_t rows = 0, row_stride = 0, k = 0, bits = 0, unit = 0;

  int64_t bytes_of(int64_t values) const { return (values * bits + 7) / 8; }
};

// Values [k0, k1) of the rows first + i * step + j, 0 <= i < count, 0 <= j < run; all are in one window.
struct Item {
  int32_t first, step, run, count;
  int32_t k0, k1;
  int32_t window;
  int32_t at = 0;     // results of one token that the items before this one leave, in the order of windows
  int32_t range = 0;  // set by make_numa_plan

  int32_t rows() const { return run * count; }
};

// Every value of every row is in exactly one item.
struct Partition {
  int64_t window = 0;                 // rows of a window; the last one may be shorter
  std::vector<Item> items;            // by node, then by window, then by k0
  std::vector<int32_t> node_first;    // [nodes + 1] of `items`
  std::vector<int32_t> in_window;     // indices of items by window, then by k0
  std::vector<int32_t> window_first;  // [windows + 1] of `in_window`
  int64_t results = 0;                // of one token: a row that is cut in three has three
  int64_t bytes = 0, local_bytes = 0;
  bool segments = false;  // some row is cut

  int64_t windows() const { return static_cast<int64_t>(window_first.size()) - 1; }
};

// `window` is a multiple of 32; the nodes of the placement are below `nodes`.
Partition cut(const MatrixShape& matrix, const Placement& placement, int nodes, int64_t window);

}  // namespace hina
