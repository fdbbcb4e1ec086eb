// Partitions of matrices by the owners of their pages: those of the shapes of real models, of which a table is printed,
// and random ones.
#include "moe/partition.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "nodes.h"

namespace {

std::mt19937 g_random(11);

int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(g_random); }

// Every value of every row is in one item, all rows of an item are in its window, and the lists of items are in order.
void check_partition(const Partition& p, const MatrixShape& m, const Placement& placement, int nodes) {
  std::vector<std::map<int64_t, int64_t>> cuts(static_cast<size_t>(m.rows));  // of each row, from k0 to k1
  CHECK(p.node_first.size() == static_cast<size_t>(nodes) + 1, "%zu", p.node_first.size());
  int64_t local = 0, results = 0;
  for (int node = 0; node < nodes; ++node)
    for (int32_t i = p.node_first[node]; i < p.node_first[node + 1]; ++i) {
      const Item& item = p.items[i];
      results += item.rows();
      CHECK(item.k0 % m.unit == 0 && (item.k1 % m.unit == 0 || item.k1 == m.k) && item.k0 < item.k1, "%d", i);
      for (int64_t r = 0; r < item.rows(); ++r) {
        const int64_t row = item.first + r / item.run * item.step + r % item.run;
        CHECK(row < m.rows && row / p.window == item.window, "row %ld of item %d", (long)row, i);
        CHECK(cuts[row].emplace(item.k0, item.k1).second, "row %ld twice", (long)row);
        for (int64_t at = m.bytes_of(item.k0); at < m.bytes_of(item.k1); ++at)
          if (m.rows * m.bytes_of(m.k) < (1 << 18))
            local += placement.node_of(m.data + static_cast<uintptr_t>(row * m.row_stride + at)) == node;
      }
    }
  for (const auto& row : cuts) {
    int64_t end = 0;
    for (const auto& [k0, k1] : row) {
      CHECK(k0 == end, "a gap or an overlap at %ld", (long)k0);
      end = k1;
    }
    CHECK(end == m.k, "a row ends at %ld", (long)end);
  }
  if (p.bytes < (1 << 18)) CHECK(local == p.local_bytes, "%ld of %ld bytes", (long)local, (long)p.local_bytes);
  CHECK(results == p.results && p.bytes == m.rows * m.bytes_of(m.k), "%ld results", (long)results);
  CHECK(p.windows() == (m.rows + p.window - 1) / p.window, "%ld windows", (long)p.windows());
  int64_t at = 0;
  for (int64_t w = 0; w < p.windows(); ++w)
    for (int32_t i = p.window_first[w]; i < p.window_first[w + 1]; ++i) {
      const Item& item = p.items[p.in_window[i]];
      CHECK(item.window == w && item.at == at, "item %d", p.in_window[i]);
      CHECK(i == p.window_first[w] || p.items[p.in_window[i - 1]].k0 <= item.k0, "item %d", p.in_window[i]);
      at += item.rows();
    }
}

void test_real_shapes() {
  std::printf("bytes read by their node, in percent, with pages of 4 KiB, data at the beginning of a page and not\n");
  std::printf("%-16s %-5s %-4s", "model", "rows", "bits");
  for (const int nodes : {1, 2, 3, 4, 8}) std::printf("   %d nodes   ", nodes);
  std::printf("\n");
  for (const Model& model : kModels)
    for (const bool down : {false, true})
      for (const int bits : {16, 8, 4}) {
        std::printf("%-16s %-5s %4d", model.name, down ? "down" : "gate", bits);
        const int64_t k = down ? model.intermediate : model.hidden;
        for (const int nodes : {1, 2, 3, 4, 8})
          for (const int64_t page : {4096, 65536, 2 << 20})
            for (const int64_t offset : {0, 1416}) {
              const int64_t rows = std::min<int64_t>(down ? model.hidden : model.intermediate, 1024);
              const MatrixShape m{static_cast<uintptr_t>((1 << 30) + offset), rows, k * bits / 8, k, bits, 512 / bits};
              const Placement placement = interleaved(reinterpret_cast<const void*>(m.data), nodes, page);
              const Partition p = cut(m, placement, nodes, 512);
              check_partition(p, m, placement, nodes);
              const double local = static_cast<double>(p.local_bytes) / static_cast<double>(p.bytes);
              CHECK(local >= 0.95, "%s, %d bits, %d nodes, pages of %ld: %.4f", model.name, bits, nodes, (long)page,
                    local);
              CHECK(nodes > 1 || (!p.segments && p.items.size() == static_cast<size_t>(p.windows())), "%s", model.name);
              if (page == 4096) std::printf(" %5.1f", 100 * local);
            }
        std::printf("\n");
      }
}

void test_random_shapes(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int nodes = static_cast<int>(pick(1, 5));
    MatrixShape m{static_cast<uintptr_t>((1 << 30) + pick(0, 5000)),
                  pick(1, 200),
                  0,
                  pick(1, 3000),
                  int64_t{4} << pick(0, 3),
                  int64_t{32} << pick(0, 3)};
    m.row_stride = m.bytes_of(m.k) * pick(1, 2);
    Placement placement = interleaved(reinterpret_cast<const void*>(m.data), nodes, int64_t{64} << pick(0, 8));
    placement.count = static_cast<int>(pick(1, kMaxNodes));  // some nodes more often than others, or none
    for (int i = 0; i < placement.count; ++i) placement.order[i] = static_cast<uint8_t>(pick(0, nodes - 1));
    check_partition(cut(m, placement, nodes, int64_t{32} << pick(0, 3)), m, placement, nodes);
  }
}

}  // namespace

int main() {
  test_real_shapes();
  test_random_shapes(200);
  std::printf("partition: passed\n");
}
