// Where pages are: patterns recognised in what the kernel might say of them, and what becomes of a layer under each
// mode with a kernel that is made up.
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "numa/blocks.h"
#include "numa/layer.h"

using namespace hina;

namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kHuge = 512;  // pages of a huge page
constexpr uintptr_t kBase = uintptr_t{0x7f12'3450'0000};

std::mt19937 g_random(5);

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(g_random); }

// The node of a page by its number in the address space; -1: not in memory.
using Kernel = std::function<int(uintptr_t page)>;

Found found_in(const Kernel& kernel, uintptr_t data, int64_t bytes) {
  std::vector<PageSample> samples;
  for (const uintptr_t address : pages_to_sample(data, bytes, kPageBytes)) {
    CHECK(address + kPageBytes > data && address < data + static_cast<uintptr_t>(bytes), "a page beside the matrix");
    samples.push_back({address, kernel(address / kPageBytes)});
  }
  return recognise(samples, kPageBytes);
}

// The share of all pages of a matrix that are where the placement says.
double right(const Placement& placement, const Kernel& kernel, uintptr_t data, int64_t bytes) {
  int64_t fits = 0, pages = 0;
  for (uintptr_t page = data / kPageBytes; page * kPageBytes < data + static_cast<uintptr_t>(bytes); ++page, ++pages)
    fits += placement.node_of(page * kPageBytes) == kernel(page);
  return static_cast<double>(fits) / static_cast<double>(pages);
}

void expect_nodes_in_turn(const std::vector<int>& order, int64_t unit, int64_t bytes) {
  for (const uintptr_t offset :
       {uintptr_t{0}, uintptr_t{64}, uintptr_t{5 * kPageBytes}, uintptr_t{777 * kPageBytes + 32}}) {
    const Kernel kernel = [&](uintptr_t page) { return order[page / static_cast<uintptr_t>(unit) % order.size()]; };
    const Found found = found_in(kernel, kBase + offset, bytes);
    CHECK(found.placement.known(), "%zu nodes in turn, %ld pages each, %ld bytes: %s", order.size(), (long)unit,
          (long)bytes, found.reason.c_str());
    CHECK(right(found.placement, kernel, kBase + offset, bytes) >= (unit == 1 ? 1.0 : 0.95), "%zu nodes in turn",
          order.size());
    const int64_t pages = bytes / kPageBytes;
    if (unit == 1 && pages >= 80)
      CHECK(found.placement.count == static_cast<int>(order.size()) && found.placement.page_bytes == kPageBytes,
            "period %d", found.placement.count);
  }
}

void test_patterns() {
  for (const int64_t bytes : {int64_t{400} << 10, int64_t{2} << 20, int64_t{29} << 20}) {
    expect_nodes_in_turn({0, 1}, 1, bytes);
    expect_nodes_in_turn({1, 0}, 1, bytes);
    expect_nodes_in_turn({2, 0, 1}, 1, bytes);
    expect_nodes_in_turn({0, 1, 2, 3}, 1, bytes);
    expect_nodes_in_turn({0, 0, 0, 1}, 1, bytes);  // weighted interleave
    expect_nodes_in_turn({7, 6, 5, 4, 3, 2, 1, 0}, 1, bytes);
    expect_nodes_in_turn({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, 1, bytes);
    expect_nodes_in_turn({0, 1}, kHuge, bytes);  // 2 MiB: two huge pages, or one
    expect_nodes_in_turn({3, 1, 0, 2}, kHuge, bytes);
    expect_nodes_in_turn({0, 1}, 16, bytes);  // 64 KiB
    expect_nodes_in_turn({5}, 1, bytes);
  }
  expect_nodes_in_turn({0, 1}, 1, 8 * kPageBytes);
}

void test_noise() {
  constexpr int64_t kBytes = 6 << 20;
  for (int round = 0; round < 50; ++round) {
    const auto strays = [&](int percent) {
      return [=](uintptr_t page) {
        std::mt19937 random(static_cast<unsigned>(page * 131 + static_cast<unsigned>(round)));
        return static_cast<int>(static_cast<int>(random() % 100) < percent ? 1 - page % 2 : page % 2);
      };
    };
    const Found few = found_in(strays(1), kBase, kBytes);
    CHECK(few.pattern == Pattern::kInterleaved && few.placement.count == 2, "%s", few.reason.c_str());
    CHECK(few.fits * 20 >= few.resident * 19, "%d of %d", few.fits, few.resident);
    const Found many = found_in(strays(25), kBase, kBytes);
    CHECK(many.pattern == Pattern::kNone && !many.placement.known(), "round %d", round);
  }
  // Pages that were dealt out in turn by two readers, so that the turns slip in the middle.
  const Kernel slipped = [](uintptr_t page) {
    return static_cast<int>((page + (page > kBase / kPageBytes + 700)) % 2);
  };
  CHECK(found_in(slipped, kBase, kBytes).pattern == Pattern::kNone, "a slip");
}

void test_no_pattern_in_random_pages() {
  int recognised = 0;
  for (int round = 0; round < 3000; ++round) {
    const int nodes = pick(2, 8), unit = 1 << pick(0, 5);
    const auto seed = static_cast<unsigned>(g_random());
    const Kernel kernel = [&](uintptr_t page) {
      std::mt19937 random(static_cast<unsigned>(page / static_cast<unsigned>(unit)) ^ seed);
      random.discard(3);
      return static_cast<int>(random() >> 8) % nodes;
    };
    const int64_t bytes = kPageBytes * pick(200, 3000);
    const Found found = found_in(kernel, kBase, bytes);
    recognised += found.placement.known() && right(found.placement, kernel, kBase, bytes) < 0.9;
  }
  CHECK(recognised <= 3, "%d of 3000 random placements were taken for a pattern", recognised);
}

void test_samples_are_at_no_one_distance() {
  const std::vector<uintptr_t> pages = pages_to_sample(kBase, 48 << 20, kPageBytes);
  std::set<uintptr_t> distances;
  for (size_t i = 40; i + 1 < pages.size(); ++i) distances.insert(pages[i + 1] - pages[i]);
  CHECK(distances.size() > 20, "%zu distances", distances.size());
}

void test_absent_pages() {
  constexpr int64_t kBytes = 6 << 20;
  const Found none = found_in([](uintptr_t) { return -2; }, kBase, kBytes);
  CHECK(none.pattern == Pattern::kNotResident && none.resident == 0, "%s", none.reason.c_str());
  CHECK(none.reason == "0 of 80 sampled pages are in memory", "%s", none.reason.c_str());
  const Found third = found_in([](uintptr_t page) { return page % 3 == 0 ? 1 : -2; }, kBase, kBytes);
  CHECK(third.pattern == Pattern::kNotResident && third.resident > 15, "%s", third.reason.c_str());
  const Found most =
      found_in([](uintptr_t page) { return page % 5 == 0 ? -2 : static_cast<int>(page % 2); }, kBase, kBytes);
  CHECK(most.pattern == Pattern::kInterleaved && most.resident < most.sampled, "%s", most.reason.c_str());
  const Found one = found_in([](uintptr_t) { return 3; }, kBase + 100, 10);
  CHECK(one.pattern == Pattern::kOneNode && one.sampled == 1, "%s", one.reason.c_str());
}

// A kernel for LayerNuma: where pages are, and what was asked of it.
struct FakeKernel {
  Kernel where;
  int error = 0;
  int asked = 0;
  bool moves = true;
  std::map<uintptr_t, int> moved;
  std::map<void*, int> preferred;
} g_kernel;

void set_kernel(const Kernel& where, int error = 0) {
  g_kernel = FakeKernel();
  g_kernel.where = where;
  g_kernel.error = error;
}

int fake_move_pages(size_t count, void** pages, const int* nodes, int* status) {
  ++g_kernel.asked;
  if (g_kernel.error != 0) return g_kernel.error;
  for (size_t i = 0; i < count; ++i) {
    const uintptr_t page = reinterpret_cast<uintptr_t>(pages[i]) / kPageBytes;
    if (nodes != nullptr && g_kernel.moves) g_kernel.moved[page] = nodes[i];
    const auto moved = g_kernel.moved.find(page);
    status[i] = moved != g_kernel.moved.end() ? moved->second : g_kernel.where(page);
  }
  return 0;
}

int fake_prefer_node(void* data, size_t, int node) {
  if (g_kernel.error == 0) g_kernel.preferred[data] = node;
  return g_kernel.error;
}

const NumaCalls kFake{fake_move_pages, fake_prefer_node};

Topology nodes(std::vector<int> ids) {
  Topology topology;
  for (const int id : ids) {
    NumaNode node;
    node.id = id;
    node.cpus = node.allowed_cpus = {id};
    topology.workers.push_back(static_cast<int>(topology.nodes.size()));
    topology.nodes.push_back(node);
    topology.worker_of_node.resize(static_cast<size_t>(id) + 1, -1);
    topology.worker_of_node.back() = static_cast<int16_t>(topology.workers.size() - 1);
  }
  return topology;
}

// Four experts of int8 weights, gate and up in turns where asked for, and a shared one; rows of half a page.
struct Weights {
  Params params;
  std::vector<std::unique_ptr<std::byte[]>> memory;

  explicit Weights(bool in_turns) {
    Params& p = params;
    p.hidden_size = 2048, p.intermediate_size = 512, p.num_experts = 4, p.top_k = 2;
    p.shared_intermediate_size = 256;
    for (int e = 0; e < p.num_experts; ++e) p.experts.push_back(expert(in_turns, p.intermediate_size));
    p.shared = expert(false, p.shared_intermediate_size);
  }

  std::byte* bytes(int64_t count) {
    memory.push_back(std::make_unique<std::byte[]>(static_cast<size_t>(count)));
    for (int64_t i = 0; i < count; i += 61) memory.back()[i] = static_cast<std::byte>(g_random());
    return memory.back().get();
  }

  Matrix matrix(int64_t rows, int64_t k) {
    Matrix m;
    m.format = WeightFormat::kUint8;
    m.row_bytes = m.row_stride = k;
    m.block = 32;
    m.scale_stride = k / 32 * 4;
    m.data = bytes(rows * k);
    m.scales = bytes(rows * m.scale_stride);
    m.zero_points = bytes(rows * k / 32);
    m.zero_point_stride = k / 32;
    return m;
  }

  Expert expert(bool in_turns, int64_t size) {
    Expert e;
    if (in_turns) {
      e.gate_up = e.gate = matrix(2 * size, params.hidden_size);
      e.gate.row_stride *= 2, e.gate.scale_stride *= 2, e.gate.zero_point_stride *= 2;
      e.up = e.gate;
      e.up.data += e.gate_up.row_stride, e.up.scales += e.gate_up.scale_stride;
      e.up.zero_points += e.gate_up.zero_point_stride;
    } else {
      e.gate = matrix(size, params.hidden_size);
      e.up = matrix(size, params.hidden_size);
    }
    e.down = matrix(params.hidden_size, size);
    return e;
  }
};

Kernel in_turn(int count) {
  return [count](uintptr_t page) { return static_cast<int>(page % static_cast<uintptr_t>(count)); };
}

bool mentions(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

void test_nothing_is_asked_on_one_node() {
  const Weights weights(false);
  for (const NumaMode mode :
       {NumaMode::kOff, NumaMode::kAuto, NumaMode::kInterleave, NumaMode::kBind, NumaMode::kCopy}) {
    set_kernel(in_turn(1));
    LayerNuma layer(nodes({0}), {mode, "HINA_NUMA", {}}, weights.params, kFake);
    CHECK(!layer.active() && layer.error().empty() && !layer.refused(), "%s", layer.text().c_str());
    CHECK(layer.look().empty() && g_kernel.asked == 0, "%s", layer.text().c_str());
  }
  LayerNuma off(nodes({0, 1}), {NumaMode::kOff, "HINA_NUMA", {}}, weights.params, kFake);
  CHECK(!off.active() && off.text() == "numa off because it was asked for", "%s", off.text().c_str());
}

void test_auto_waits_for_pages_and_then_follows_them() {
  for (const bool in_turns : {false, true}) {
    const Weights weights(in_turns);
    set_kernel([](uintptr_t) { return -ENOENT; });
    LayerNuma layer(nodes({0, 1}), {}, weights.params, kFake);
    CHECK(layer.active() && g_kernel.asked == 0, "%s", layer.text().c_str());
    std::vector<int> looked;
    Call call;
    for (int run = 1; run <= 16; ++run) {
      if (run == 9) g_kernel.where = in_turn(2);
      const std::string news = layer.look();
      if (!news.empty()) looked.push_back(run);
      layer.apply(call);
      CHECK((call.numa != nullptr) == (run == 16), "run %d: %s", run, news.c_str());
      if (run < 16 && !news.empty()) CHECK(mentions(news, "pages are in memory; looks again"), "%s", news.c_str());
      if (run == 16) CHECK(mentions(news, "numa interleave on nodes 0, 1"), "%s", news.c_str());
    }
    CHECK((looked == std::vector<int>{1, 2, 4, 8, 16}), "looked %zu times", looked.size());
    const int asked = g_kernel.asked;
    for (int run = 17; run <= 70; ++run) CHECK(layer.look().empty(), "run %d", run);
    CHECK(g_kernel.asked == asked, "asked again");
  }
}

// Not even those who asked for it get a plan that knows little, while more is about to be known.
void test_interleave_waits_for_pages() {
  const Weights weights(false);
  const uintptr_t first = reinterpret_cast<uintptr_t>(weights.params.experts[0].down.data) / kPageBytes;
  const Kernel one_matrix = [first](uintptr_t page) {
    return page >= first && page <= first + 2048 * 512 / kPageBytes ? static_cast<int>(page % 2) : -ENOENT;
  };
  for (const bool all_come : {true, false}) {
    set_kernel(one_matrix);
    LayerNuma layer(nodes({0, 1}), {NumaMode::kInterleave, "HINA_NUMA", {}}, weights.params, kFake);
    std::string news = layer.look();
    CHECK(mentions(news, "numa off because 1 of the first 15 matrices"), "%s", news.c_str());
    CHECK(mentions(news, "looks again before run 2") && !layer.refused(), "%s", news.c_str());
    if (all_come) g_kernel.where = in_turn(2);
    int run = 1;
    for (; run < 100 && !news.starts_with("numa interleave"); ++run)
      if (const std::string text = layer.look(); !text.empty()) news = text;
    CHECK(run == (all_come ? 2 : 64), "run %d: %s", run, news.c_str());
    CHECK(mentions(news, all_come ? "15 of 15 matrices" : "1 of 15 matrices"), "%s", news.c_str());
  }
}

void test_pages_elsewhere_turn_auto_off() {
  const Weights weights(false);
  const auto after_a_run = [&](const Kernel& kernel, NumaMode mode) {
    set_kernel(kernel);
    LayerNuma layer(nodes({0, 1}), {mode, "default", {}}, weights.params, kFake);
    std::string news = layer.look();
    Call call;
    layer.apply(call);
    CHECK((call.numa != nullptr) == news.starts_with("numa interleave"), "%s", news.c_str());
    CHECK(layer.look().empty(), "nothing will change");
    return news;
  };
  CHECK(mentions(after_a_run([](uintptr_t) { return 1; }, NumaMode::kAuto), "all weights are on node 1"), "one node");
  const Kernel random = [](uintptr_t page) { return static_cast<int>(page * 2654435761u >> 13) & 1; };
  CHECK(mentions(after_a_run(random, NumaMode::kAuto), "make no pattern"), "random");
  // Of 15 matrices, the last three without a pattern are too many for auto, and none too many for interleave.
  const Expert& shared = weights.params.shared;
  const Kernel partly = [&](uintptr_t page) {
    for (const Matrix* matrix : {&shared.gate, &shared.up, &shared.down}) {
      const uintptr_t first = reinterpret_cast<uintptr_t>(matrix->data) / kPageBytes;
      if (page >= first && page <= first + 256 * 2048 / kPageBytes) return random(page);
    }
    return static_cast<int>(page % 2);
  };
  CHECK(mentions(after_a_run(partly, NumaMode::kAuto), "numa off"), "partly");
  CHECK(mentions(after_a_run(partly, NumaMode::kInterleave), "numa interleave"), "partly");
}

void test_refusals() {
  const Weights weights(false);
  for (const NumaMode mode : {NumaMode::kAuto, NumaMode::kInterleave, NumaMode::kBind, NumaMode::kCopy}) {
    set_kernel(in_turn(2), EPERM);
    LayerNuma layer(nodes({0, 1}), {mode, "HINA_NUMA", {}}, weights.params, kFake);
    CHECK(layer.error().empty(), "%s", layer.error().c_str());
    const std::string text = mode == NumaMode::kBind || mode == NumaMode::kCopy ? layer.text() : layer.look();
    CHECK(mentions(text, "numa off because the kernel refused m") && mentions(text, "(Operation not permitted)"), "%s",
          text.c_str());
    CHECK(layer.refused() == (mode != NumaMode::kAuto), "%s", text.c_str());
    const int asked = g_kernel.asked;
    CHECK(layer.look().empty() && g_kernel.asked == asked, "asked again");
    Call call;
    layer.apply(call);
    CHECK(call.numa == nullptr && call.copies == nullptr, "%s", text.c_str());
  }
}

void test_bind_moves_a_part_to_each_node() {
  for (const bool in_turns : {false, true}) {
    const Weights weights(in_turns);
    set_kernel([](uintptr_t) { return 0; });
    LayerNuma layer(nodes({0, 3}), {NumaMode::kBind, "HINA_NUMA", {}}, weights.params, kFake);
    CHECK(layer.text().starts_with("numa bind on nodes 0, 3"), "%s", layer.text().c_str());
    Call call;
    layer.apply(call);
    CHECK(call.numa != nullptr && layer.active(), "%s", layer.text().c_str());
    for (int64_t e = 0; e < expert_count(weights.params); ++e) {
      const std::span<const std::byte> data = blocks_of(weights.params, e).down.data();
      const auto first = reinterpret_cast<uintptr_t>(data.data()) / kPageBytes;
      const auto pages = (reinterpret_cast<uintptr_t>(data.data() + data.size()) - 1) / kPageBytes + 1 - first;
      for (uintptr_t i = 1; i + 1 < pages; ++i)
        CHECK(g_kernel.moved.at(first + i) == (i < (pages + 1) / 2 ? 0 : 3), "expert %ld, page %lu", (long)e, i);
    }
  }
  const Weights weights(false);
  set_kernel([](uintptr_t) { return 0; });
  g_kernel.moves = false;  // other processes map the pages
  LayerNuma stuck(nodes({0, 1}), {NumaMode::kBind, "HINA_NUMA", {}}, weights.params, kFake);
  CHECK(mentions(stuck.text(), "numa off because ") && mentions(stuck.text(), " pages of a matrix did not move"), "%s",
        stuck.text().c_str());
  CHECK(stuck.refused() && !stuck.active(), "%s", stuck.text().c_str());
  Topology topology = nodes({0, 1});
  topology.nodes[1].memory_allowed = false;
  LayerNuma layer(topology, {NumaMode::kBind, "HINA_NUMA", {}}, weights.params, kFake);
  CHECK(layer.text() == "numa off because node 1 has no memory that this process may use", "%s", layer.text().c_str());
}

void test_copies() {
  for (const bool in_turns : {false, true}) {
    const Weights weights(in_turns);
    set_kernel(in_turn(2));
    LayerNuma layer(nodes({0, 3}), {NumaMode::kCopy, "HINA_NUMA", {}}, weights.params, kFake);
    CHECK(layer.error().empty() && mentions(layer.text(), "numa copy on nodes 0, 3, "), "%s", layer.text().c_str());
    CHECK(g_kernel.preferred.size() == 2, "%zu", g_kernel.preferred.size());
    Call call;
    layer.apply(call);
    CHECK(call.numa == nullptr && call.copies != nullptr, "%s", layer.text().c_str());
    const auto same = [](std::span<const std::byte> a, std::span<const std::byte> b) {
      return a.data() != b.data() && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
    };
    for (int node = 0; node < 2; ++node) {
      const Params& copy = *call.copies[node];
      for (int64_t e = 0; e < expert_count(weights.params); ++e) {
        const Expert &to = expert_at(copy, e), &from = expert_at(weights.params, e);
        const int64_t size = e == 4 ? 256 : 512;
        const auto both = {Block{&to.gate, size, 2048}, Block{&to.up, size, 2048}, Block{&to.down, 2048, size}};
        const Matrix* original[] = {&from.gate, &from.up, &from.down};
        for (int i = 0; const Block& block : both) {
          const Block other{original[i++], block.rows, block.k};
          CHECK(same(block.data(), other.data()) && same(block.scales(), other.scales()) &&
                    same(block.zero_points(), other.zero_points()),
                "node %d, expert %ld, matrix %d", node, (long)e, i);
        }
        CHECK((to.gate_up.data != nullptr) == (from.gate_up.data != nullptr), "expert %ld", (long)e);
      }
    }
    CHECK(call.copies[0]->experts[1].down.data != call.copies[1]->experts[1].down.data, "one copy for two nodes");
  }
  const Weights weights(false);
  NumaCalls calls = kFake;
  calls.available_memory = [](const std::string&) { return int64_t{20} << 20; };
  LayerNuma layer(nodes({0, 1}), {NumaMode::kCopy, "HINA_NUMA", {}}, weights.params, calls);
  CHECK(mentions(layer.error(), "but 20 MiB are available: choose another mode"), "%s", layer.error().c_str());
  calls.available_memory = [](const std::string&) { return int64_t{0}; };  // not told
  LayerNuma untold(nodes({0, 1}), {NumaMode::kCopy, "HINA_NUMA", {}}, weights.params, calls);
  CHECK(untold.error().empty() && untold.active(), "%s", untold.error().c_str());
}

void test_available_memory() {
  std::string root = std::filesystem::temp_directory_path() / "available-XXXXXX";
  CHECK(mkdtemp(root.data()) != nullptr, "%s", root.c_str());
  const std::filesystem::path folder(root), group = folder / "sys/fs/cgroup";
  std::filesystem::create_directories(folder / "proc");
  std::filesystem::create_directories(group);
  const auto write = [](const std::filesystem::path& path, const char* text) { std::ofstream(path) << text; };
  const auto expect = [&](int64_t bytes) {
    CHECK(available_memory(root) == bytes, "%ld, expected %ld", (long)available_memory(root), (long)bytes);
  };
  expect(0);
  write(folder / "proc/meminfo", "MemTotal: 4096 kB\nMemAvailable: 2048 kB\n");
  expect(2048 * 1024);
  write(group / "memory.max", "max\n");
  expect(2048 * 1024);
  write(group / "memory.max", "1048576\n");
  write(group / "memory.stat", "anon 1000000\nfile 500000\ninactive_anon 7\n");
  expect(48576);
  write(group / "memory.stat", "anon 2000000\n");
  expect(1);
  std::filesystem::remove_all(folder);
}

void test_runs_at_once() {
  const Weights weights(false);
  set_kernel(in_turn(2));
  LayerNuma layer(nodes({0, 1}), {}, weights.params, kFake);
  std::atomic<int> decided{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int run = 0; run < 50; ++run) {
        decided += !layer.look().empty();
        Call call;
        layer.apply(call);
        if (call.numa != nullptr) CHECK(call.numa->nodes == 2, "a plan that is not whole");
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(decided == 1, "decided %d times", decided.load());
}

}  // namespace

int main() {
  test_patterns();
  test_noise();
  test_no_pattern_in_random_pages();
  test_samples_are_at_no_one_distance();
  test_absent_pages();
  test_nothing_is_asked_on_one_node();
  test_refusals();
  test_copies();
  test_available_memory();
  test_pages_elsewhere_turn_auto_off();
  test_auto_waits_for_pages_and_then_follows_them();
  test_interleave_waits_for_pages();
  test_bind_moves_a_part_to_each_node();
  test_runs_at_once();
  std::printf("placement: passed\n");
}
