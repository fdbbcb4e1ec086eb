#include "moe/partition.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <tuple>

namespace hina {
namespace {

constexpr int64_t kCoarsestCut = 512;  // bytes; a grid moves a cut by a quarter of its distance, on average

struct Segment {
  int64_t k0, k1;
  int node;
  int64_t local_bytes;
};

// The pages of one matrix, as its rows lie in them.
class Rows {
 public:
  Rows(const MatrixShape& matrix, const Placement& placement) : matrix_(matrix), placement_(placement) {}

  // The parts of a row with cuts at multiples of `grid` values; 0: no cuts.
  std::vector<Segment> segments(int64_t row, int64_t grid) const {
    const uintptr_t begin = matrix_.data + static_cast<uintptr_t>(row * matrix_.row_stride);
    const int64_t bytes = matrix_.bytes_of(matrix_.k);
    std::vector<Segment> all;
    int64_t from = 0;
    const auto add = [&](int64_t to) {
      const auto [node, local] = owner(begin, matrix_.bytes_of(from), matrix_.bytes_of(to));
      if (!all.empty() && all.back().node == node)
        all.back().k1 = to, all.back().local_bytes += local;
      else
        all.push_back({from, to, node, local});
      from = to;
    };
    for (int64_t end = first_end(begin); grid > 0 && end < bytes; end += placement_.page_bytes) {
      const int64_t at = (end * 8 / matrix_.bits + grid / 2) / grid * grid;
      if (at > from && at < matrix_.k) add(at);
    }
    add(matrix_.k);
    return all;
  }

 private:
  // From `begin` to the first end of a page behind it.
  int64_t first_end(uintptr_t begin) const {
    const auto page = static_cast<uintptr_t>(placement_.page_bytes);
    return static_cast<int64_t>(page - (begin - placement_.origin) % page);
  }

  // The node that has most of the bytes [from, to) behind `begin`, and how many it has.
  std::pair<int, int64_t> owner(uintptr_t begin, int64_t from, int64_t to) const {
    std::array<int64_t, kMaxNodes> bytes{};
    for (int64_t at = from, end; at < to; at = end) {
      const uintptr_t address = begin + static_cast<uintptr_t>(at);
      end = std::min(to, at + first_end(address));
      bytes[placement_.node_of(address)] += end - at;
    }
    const auto most = std::max_element(bytes.begin(), bytes.end());
    return {static_cast<int>(most - bytes.begin()), *most};
  }

  const MatrixShape& matrix_;
  const Placement& placement_;
};

// The coarsest grid that leaves enough bytes of the first `count` rows local, or the finest one.
int64_t choose_grid(const MatrixShape& matrix, const Rows& rows, int64_t count) {
  const auto local = [&](int64_t grid) {
    int64_t bytes = 0;
    for (int64_t row = 0; row < count; ++row)
      for (const Segment& segment : rows.segments(row, grid)) bytes += segment.local_bytes;
    return static_cast<double>(bytes) >= kLeastLocal * static_cast<double>(count * matrix.bytes_of(matrix.k));
  };
  if (local(0)) return 0;
  int64_t grid = std::max<int64_t>(kCoarsestCut * 8 / matrix.bits / matrix.unit, 1) * matrix.unit;
  while (grid / 2 >= matrix.unit && grid / 2 % matrix.unit == 0 && !local(grid)) grid /= 2;
  return grid;
}

struct Run {
  int32_t first, rows;
};

// Rows in ascending order as runs at constant distances: that of the next run, or the period of the matrix.
void add_items(const std::vector<int32_t>& rows, int64_t period, const Item& like, std::vector<Item>& items) {
  std::vector<Run> runs;
  for (const int32_t row : rows) {
    if (!runs.empty() && runs.back().first + runs.back().rows == row)
      ++runs.back().rows;
    else
      runs.push_back({row, 1});
  }
  std::vector<bool> taken(runs.size());
  // Runs at `step` from run i on, all of the same length.
  const auto chain = [&](size_t i, int64_t step) {
    std::vector<size_t> links{i};
    for (size_t j = i + 1; j < runs.size(); ++j) {
      const int64_t distance = runs[j].first - runs[links.back()].first;
      if (distance == step && runs[j].rows == runs[i].rows && !taken[j]) links.push_back(j);
    }
    return links;
  };
  for (size_t i = 0; i < runs.size(); ++i) {
    if (taken[i]) continue;
    std::vector<size_t> best = chain(i, period);
    if (i + 1 < runs.size() && !taken[i + 1])
      if (std::vector<size_t> near = chain(i, runs[i + 1].first - runs[i].first); near.size() > best.size())
        best = std::move(near);
    for (const size_t j : best) taken[j] = true;
    Item item = like;
    item.first = runs[i].first, item.run = runs[i].rows, item.count = static_cast<int32_t>(best.size());
    item.step = item.count > 1 ? runs[best[1]].first - item.first : item.run;
    items.push_back(item);
  }
}

// Rows after which the pages' owners are the same again.
int64_t period_of(const MatrixShape& matrix, const Placement& placement) {
  const int64_t all = placement.count * placement.page_bytes;
  return all / std::gcd(matrix.row_stride, all);
}

}  // namespace

Partition cut(const MatrixShape& matrix, const Placement& placement, int nodes, int64_t window) {
  const Rows rows(matrix, placement);
  const int64_t period = period_of(matrix, placement), distinct = std::min(period, matrix.rows);
  const int64_t grid = choose_grid(matrix, rows, distinct);
  std::vector<std::vector<Segment>> segments;  // of the rows of a period
  for (int64_t row = 0; row < distinct; ++row) segments.push_back(rows.segments(row, grid));
  Partition partition;
  partition.window = window;
  partition.bytes = matrix.rows * matrix.bytes_of(matrix.k);
  std::vector<std::vector<Item>> of_node(static_cast<size_t>(nodes));
  for (int64_t begin = 0; begin < matrix.rows; begin += window) {
    std::map<std::tuple<int, int64_t, int64_t>, std::vector<int32_t>> alike;
    for (int64_t row = begin; row < std::min(begin + window, matrix.rows); ++row)
      for (const Segment& s : segments[static_cast<size_t>(row % period)]) {
        alike[{s.node, s.k0, s.k1}].push_back(static_cast<int32_t>(row));
        partition.local_bytes += s.local_bytes;
      }
    for (const auto& [key, list] : alike) {
      const auto [node, k0, k1] = key;
      const Item like{
          0, 0, 0, 0, static_cast<int32_t>(k0), static_cast<int32_t>(k1), static_cast<int32_t>(begin / window)};
      add_items(list, period, like, of_node[static_cast<size_t>(node)]);
      partition.segments |= k1 - k0 < matrix.k;
    }
  }
  partition.node_first.push_back(0);
  for (const auto& items : of_node) {
    partition.items.insert(partition.items.end(), items.begin(), items.end());
    partition.node_first.push_back(static_cast<int32_t>(partition.items.size()));
  }
  partition.in_window.resize(partition.items.size());
  std::iota(partition.in_window.begin(), partition.in_window.end(), 0);
  std::stable_sort(partition.in_window.begin(), partition.in_window.end(), [&](int32_t a, int32_t b) {
    const Item &x = partition.items[static_cast<size_t>(a)], &y = partition.items[static_cast<size_t>(b)];
    return std::tie(x.window, x.k0) < std::tie(y.window, y.k0);
  });
  for (size_t i = 0; i < partition.in_window.size(); ++i) {
    Item& item = partition.items[static_cast<size_t>(partition.in_window[i])];
    while (static_cast<int64_t>(partition.window_first.size()) <= item.window)
      partition.window_first.push_back(static_cast<int32_t>(i));
    item.at = static_cast<int32_t>(partition.results);
    partition.results += item.rows();
  }
  partition.window_first.push_back(static_cast<int32_t>(partition.in_window.size()));
  return partition;
}

}  // namespace hina
