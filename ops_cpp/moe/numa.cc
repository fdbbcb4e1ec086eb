#include "moe/numa.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "moe/blocking.h"
#include "moe/workspace.h"

namespace hina {
namespace {

constexpr int64_t kGoodItemBytes =
    64 * 1024;                        // 16 streams of a page; windows are as small as lets items have so much ..
constexpr int64_t kMostWindow = 512;  // .. but not larger than this
constexpr size_t kMostRanges = 64;    // of k in a phase: int8 tokens are kept once for each
constexpr int64_t kMostResultBytes = 64 * 1024 * 1024;
// Per expert, on average: with more the layer is bound by arithmetic, and the plain plan has larger blocks.
constexpr int64_t kMostTokens = 64;

// Rows are cut where a line of 64 bytes ends, if the first row begins one, and where their blocks do: two of them where
// their zero points share a byte.
MatrixShape shape_of(const Matrix& m, int64_t rows, int64_t k) {
  const bool pairs = m.zero_points != nullptr && m.zero_point_type == DataType::kUint4;
  const int64_t bits = m.bits();
  const int64_t unit = std::max<int64_t>({512 / bits, 32, m.block * (pairs ? 2 : 1)});
  return {reinterpret_cast<uintptr_t>(m.data), rows, m.row_stride, k, bits, unit};
}

// Where it is not known where pages are, any node may read any rows.
Placement placement_of(const Placement& placement, const MatrixShape& shape, int nodes) {
  if (placement.known()) return placement;
  Placement any{nodes, kRows * shape.row_stride, shape.data, {}};
  for (int n = 0; n < nodes; ++n) any.order[n] = static_cast<uint8_t>(n);
  return any;
}

class Maker {
 public:
  Maker(const Params& params, int nodes, std::span<const ExpertPlacement> placements)
      : p_(params), nodes_(nodes), placements_(placements) {}

  std::unique_ptr<NumaPlan> make(int64_t least_item_bytes) {
    auto plan = std::make_unique<NumaPlan>();
    plan->nodes = nodes_;
    plan->experts.resize(placements_.size());
    items_ = bytes_ = local_ = 0;
    for (const int phase : {kFc1, kFc2, kSharedFc2})
      if (!cut_phase(static_cast<Phase>(phase), *plan)) return nullptr;
    if (one_node_ || !any_known_ || bytes_ / std::max<int64_t>(items_, 1) < least_item_bytes) return nullptr;
    plan->locality = static_cast<double>(local_) / static_cast<double>(bytes_);
    for (const ExpertPartition& e : plan->experts) {
      plan->fc1_results = std::max(plan->fc1_results, e.up->results + (e.gate == nullptr ? 0 : e.gate->results));
      plan->fc2_results = std::max(plan->fc2_results, e.down->results);
      plan->most_window = std::max({plan->most_window, e.up->window, e.down->window});
      plan->most_fc1_windows = std::max(plan->most_fc1_windows, e.up->windows());
    }
    return plan;
  }

 private:
  // Matrices alike in this are cut alike; experts of one tensor mostly are.
  using Key = std::tuple<std::vector<int>, uintptr_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

  struct Wanted {
    const Matrix* matrix;
    const Placement* placement;
    int64_t rows, k;
    const Partition** partition;
  };

  std::vector<Wanted> wanted(Phase phase, NumaPlan& plan) const {
    std::vector<Wanted> all;
    for (size_t e = 0; e < placements_.size(); ++e) {
      const bool is_shared = static_cast<int64_t>(e) == p_.num_experts;
      const Expert& expert = is_shared ? p_.shared : p_.experts[e];
      const int64_t size = is_shared ? p_.shared_intermediate_size : p_.intermediate_size, hidden = p_.hidden_size;
      const ExpertPlacement& at = placements_[e];
      ExpertPartition& cut = plan.experts[e];
      if (phase == (is_shared ? kSharedFc2 : kFc2)) all.push_back({&expert.down, &at.down, hidden, size, &cut.down});
      if (phase != kFc1) continue;
      all.push_back({&expert.up, &at.up, size, hidden, &cut.up});
      if (is_shared ? p_.shared_gated : p_.gated) all.push_back({&expert.gate, &at.gate, size, hidden, &cut.gate});
    }
    return all;
  }

  bool cut_phase(Phase phase, NumaPlan& plan) {
    const std::vector<Wanted> all = wanted(phase, plan);
    if (all.empty()) return true;
    std::map<Key, std::unique_ptr<Partition>> distinct;
    int64_t items = 0, bytes = 0, local = 0;
    // The windows of both kinds of `down` are those of the routed experts: their rows are added up together.
    for (int64_t window = phase == kSharedFc2 ? down_window_ : kRows; window <= kMostWindow;) {
      distinct.clear();
      items = bytes = local = 0;
      for (const Wanted& m : all) {
        const Partition& cut = partition_of(m, window, distinct);
        *m.partition = &cut;
        items += static_cast<int64_t>(cut.items.size()), bytes += cut.bytes;
        local += m.placement->known() ? cut.local_bytes : cut.bytes / nodes_;
        any_known_ |= m.placement->known();
      }
      if (phase == kFc2) down_window_ = window;
      if (phase == kSharedFc2 || bytes >= items * kGoodItemBytes) break;
      // Items of windows twice as large are hardly more than twice as large.
      const int64_t before = window;
      do window *= 2;
      while (window < kMostWindow && bytes * (window / before) < items * kGoodItemBytes);
    }
    items_ += items, bytes_ += bytes, local_ += local;
    std::vector<KRange>& ranges = plan.ranges[phase];
    ranges = {{0, all[0].k}};
    for (auto& [key, partition] : distinct) {
      if (!number_ranges(*partition, ranges)) return false;
      plan.segments |= partition->segments;
      plan.partitions.push_back(std::move(partition));
    }
    return true;
  }

  const Partition& partition_of(const Wanted& m, int64_t window, std::map<Key, std::unique_ptr<Partition>>& distinct) {
    const MatrixShape shape = shape_of(*m.matrix, m.rows, m.k);
    const Placement placement = placement_of(*m.placement, shape, nodes_);
    const std::vector<int> order(placement.order, placement.order + placement.count);
    const uintptr_t phase =
        (shape.data - placement.origin) % static_cast<uintptr_t>(placement.count * placement.page_bytes);
    std::unique_ptr<Partition>& cut = distinct[{order, phase, placement.page_bytes, shape.rows, shape.row_stride,
                                                shape.k, shape.bits, shape.unit, window}];
    if (cut == nullptr) cut = std::make_unique<Partition>(hina::cut(shape, placement, nodes_, window));
    for (const int node : order) {
      if (first_node_ < 0) first_node_ = node;
      one_node_ &= node == first_node_;
    }
    return *cut;
  }

  // False where there are too many.
  static bool number_ranges(Partition& partition, std::vector<KRange>& ranges) {
    for (Item& item : partition.items) {
      const auto same = [&](const KRange& r) { return r.from == item.k0 && r.to == item.k1; };
      const auto found = std::find_if(ranges.begin(), ranges.end(), same);
      item.range = static_cast<int32_t>(found - ranges.begin());
      if (found != ranges.end()) continue;
      if (ranges.size() == kMostRanges) return false;
      ranges.push_back({item.k0, item.k1});
    }
    return true;
  }

  const Params& p_;
  int nodes_;
  std::span<const ExpertPlacement> placements_;
  int64_t items_ = 0, bytes_ = 0, local_ = 0, down_window_ = kMostWindow;
  int first_node_ = -1;
  bool one_node_ = true, any_known_ = false;
};

}  // namespace

std::unique_ptr<const NumaPlan> make_numa_plan(const Params& params, int nodes,
                                               std::span<const ExpertPlacement> experts, int64_t least_item_bytes) {
  if (nodes < 2) return nullptr;
  return Maker(params, nodes, experts).make(least_item_bytes);
}

bool uses_numa(const NumaPlan* plan, const Params& params, int64_t tokens) {
  if (plan == nullptr) return false;
  if (times(tokens, params.top_k) > kMostTokens * params.num_experts) return false;
  return times(slot_count(params, tokens), (plan->fc1_results + plan->fc2_results) * 4) <= kMostResultBytes;
}

}  // namespace hina
