// Whole layers that are computed by a NumaPlan: random ones with pages so small that rows are cut, for any threads and
// nodes of threads; and which bytes are read by workers of which node in layers of the shapes of real models.
#include "moe/numa.h"

#include <utility>

#include "layers.h"
#include "moe/layer.h"
#include "nodes.h"

namespace {

// --- layers ---

std::atomic<int> g_asked{0};
int g_nodes = 1;
int first_node() { return 0; }
int last_node() { return g_nodes - 1; }
int next_node() { return g_asked++ % g_nodes; }

// The node that has read least so far: one thread that is on it takes the tasks that threads of all nodes would take
// if they were equally fast.
const Reads* g_reads = nullptr;
int fair_node() {
  static int64_t seen = 0, bytes[kMaxNodes];
  if (g_reads->count == 0) seen = 0, std::fill_n(bytes, kMaxNodes, 0);
  for (; seen < g_reads->count; ++seen) bytes[g_reads->all[seen].node] += g_reads->all[seen].bytes;
  return static_cast<int>(std::min_element(bytes, bytes + g_nodes) - bytes);
}

// Owners of pages so small that the rows of small matrices lie in several, or of whole rows.
Placement random_placement(const Matrix& matrix, int nodes, bool whole_rows) {
  if (pick(0, 9) == 0) return {};
  Placement placement = interleaved(matrix.data, nodes, int64_t{64} << pick(0, 5));
  if (whole_rows && matrix.data != nullptr) {
    placement.page_bytes = matrix.row_stride * pick(1, 50);
    placement.origin = reinterpret_cast<uintptr_t>(matrix.data);
  }
  if (pick(0, 1)) std::shuffle(placement.order, placement.order + nodes, g_random);
  return placement;
}

std::vector<ExpertPlacement> random_placements(const Params& p, int nodes) {
  std::vector<ExpertPlacement> all;
  const bool whole_rows = pick(0, 1);
  const auto add = [&](const Expert& e) {
    all.push_back({random_placement(e.gate, nodes, whole_rows), random_placement(e.up, nodes, whole_rows),
                   random_placement(e.down, nodes, whole_rows)});
  };
  for (const Expert& expert : p.experts) add(expert);
  if (p.shared_intermediate_size > 0) add(p.shared);
  return all;
}

double relative_error(const Call& call, const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  double error = 0.0, norm = 0.0;
  for (int64_t i = 0; i < static_cast<int64_t>(a.size()) / size_of(call.type); ++i) {
    const double x = value_of(call.type, a.data(), i), y = value_of(call.type, b.data(), i);
    if (x == y) continue;  // infinities, too
    error += (x - y) * (x - y), norm += x * x;
  }
  return norm == 0.0 ? 0.0 : std::sqrt(error / norm);
}

struct Outcome {
  std::vector<std::byte> output;
  std::vector<Read> reads;

  // Reads are recorded up to `room`.
  Outcome(const Params& p, const KernelSet& kernels, Call call, Threads threads, size_t room = 0)
      : output(static_cast<size_t>(call.tokens * p.hidden_size * size_of(call.type))), reads(room) {
    std::vector<int64_t> counts(static_cast<size_t>(p.num_experts));
    Reads recorded{reads};
    if (room > 0) g_reads = call.reads = &recorded;
    CHECK(run(p, kernels, call, threads, output, counts).empty(), "%ld tokens", (long)call.tokens);
    CHECK(recorded.count <= static_cast<int64_t>(reads.size()), "%ld reads", (long)recorded.count);
    reads.resize(static_cast<size_t>(recorded.count));
    for (size_t e = 0; e < counts.size(); ++e)
      if (counts[e] > 0) add(p.experts[e], p.gated, p.hidden_size, p.intermediate_size);
    if (p.shared_intermediate_size > 0 && call.tokens > 0)
      add(p.shared, p.shared_gated, p.hidden_size, p.shared_intermediate_size);
  }

  // Whether each byte of the weights that are used was read once.
  bool complete() {
    std::sort(reads.begin(), reads.end(), [](const Read& a, const Read& b) { return a.address < b.address; });
    int64_t bytes = 0;
    const std::byte* end = nullptr;
    for (const Read& read : reads) {
      const auto* begin = static_cast<const std::byte*>(read.address);
      if (begin < end) return false;
      end = begin + read.bytes, bytes += read.bytes;
    }
    return bytes == used_;
  }

 private:
  void add(const Expert& e, bool gated, int64_t hidden, int64_t size) {
    const auto add_matrix = [&](const Matrix& m, int64_t rows, int64_t k) {
      used_ += rows * (m.quantised() ? m.row_bytes : k * m.bits() / 8);
    };
    if (gated) add_matrix(e.gate, size, hidden);
    add_matrix(e.up, size, hidden), add_matrix(e.down, hidden, size);
  }

  int64_t used_ = 0;
};

// Of a layer whose rows are added up in another order. A product of K = 270 values in float32 is off by less than 270 *
// 2^-24 = 2e-5 of the sum of magnitudes; that may change the last bit of a value that is rounded to 16 bits, 2^-8 for
// bfloat16, or one of the codes between FC1 and FC2, 1 / 127 of the largest value of its unit.
double tolerance(const Params& p, const Call& call) {
  return p.int8_activations ? 3e-2 : call.type == DataType::kFloat32 ? 2e-5 : 1e-2;
}

bool in_buffers(const Buffers& buffers, size_t count, const void* address) {
  const void* nearest = nullptr;
  bool is_first = false;
  for (size_t i = 0; i < buffers.all.size(); ++i)
    if (const void* begin = buffers.all[i].get(); begin <= address && begin > nearest)
      nearest = begin, is_first = i < count;
  return is_first;
}

// Each node has its own copy of the weights, which only its workers read.
void test_copies(int round) {
  const KernelSet kernels = pick(0, 1) ? with_tiles() : select_kernels(choose_isa().isa);
  Buffers buffers;
  const std::mt19937 before = g_random;
  const Params p = random_layer(buffers);
  const auto after = std::exchange(g_random, before);
  const size_t of_first = buffers.all.size();
  const Params other = random_layer(buffers);
  g_random = after;
  std::vector<int64_t> ids;
  Call call = random_call(buffers, p, pick(1, 33), ids);
  const Outcome plain(p, kernels, call, {2});
  const Params* const copies[] = {&p, &other};
  call.copies = copies;
  g_nodes = 2;
  for (int (*const node)() : {first_node, last_node, next_node}) {
    const Outcome copied(p, kernels, call, {3, node}, 1 << 17);
    CHECK(copied.output == plain.output, "round %d", round);
    for (const Read& read : copied.reads)
      CHECK(in_buffers(buffers, of_first, read.address) == (read.node == 0), "round %d: node %d", round, read.node);
  }
}

int test_layer(int round) {
  const KernelSet kernels = pick(0, 1) ? with_tiles() : select_kernels(choose_isa().isa);
  Buffers buffers;
  const Params p = random_layer(buffers, 3);
  std::vector<int64_t> ids;
  constexpr int64_t kTokens[] = {0, 1, 3, 16, 33};
  const Call call = random_call(buffers, p, kTokens[pick(0, 4)], ids);
  g_nodes = static_cast<int>(pick(2, 4));
  const auto plan = make_numa_plan(p, g_nodes, random_placements(p, g_nodes), 0);
  if (plan == nullptr) return 0;
  Outcome plain(p, kernels, call, {2}, 1 << 17);
  CHECK(plain.complete(), "round %d: the plain plan does not read every byte once", round);
  Call placed = call;
  placed.numa = plan.get();
  Outcome one(p, kernels, placed, {1}, 1 << 18);
  CHECK(one.complete(), "round %d: not every byte was read once", round);
  if (!plan->segments) CHECK(one.output == plain.output, "round %d: other bits than the plain plan", round);
  const double error = relative_error(call, plain.output, one.output);
  CHECK(error <= tolerance(p, call), "round %d: relative error %g", round, error);
  for (const int threads : {1, 3})
    for (int (*const node)() : {first_node, last_node, next_node})
      CHECK(Outcome(p, kernels, placed, {threads, node}).output == one.output,
            "round %d: %d threads or their nodes change the result", round, threads);
  if (call.tokens > 1 && one.reads.size() > 0) {
    placed.tokens_at_once = pick(1, call.tokens);
    CHECK(Outcome(p, kernels, placed, {2, next_node}).output == one.output, "round %d: pieces of %ld tokens", round,
          (long)placed.tokens_at_once);
  }
  return plan->segments ? 1 : 2;
}

// --- who reads what ---

// Memory that is never written, which costs nothing; all zeros.
struct Zeros {
  size_t bytes;
  std::byte* data;

  explicit Zeros(int64_t size) : bytes(static_cast<size_t>(size)) {
    data = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    CHECK(data != MAP_FAILED, "mmap of %zu bytes", bytes);
  }
  Zeros(const Zeros&) = delete;
  ~Zeros() { munmap(data, bytes); }
};

// `experts` experts of a model, one matrix after the other, the first one `offset` bytes behind the beginning of a
// page.
struct BigLayer {
  static constexpr int64_t kExperts = 2;
  Params p;
  std::unique_ptr<Zeros> weights, scales;
  std::vector<float> x, logits;
  std::vector<ExpertPlacement> placements;

  BigLayer(const Model& model, WeightFormat format, int nodes, int64_t offset) {
    p.hidden_size = model.hidden, p.intermediate_size = model.intermediate;
    p.num_experts = kExperts, p.top_k = 1;
    p.router.input = RouterInput::kLogits;
    p.int8_activations = format != WeightFormat::kFloat;
    Matrix like;
    like.type = DataType::kBFloat16, like.format = format, like.block = format == WeightFormat::kFloat ? 0 : 32;
    const int64_t bytes = model.hidden * model.intermediate * like.bits() / 8;
    weights = std::make_unique<Zeros>(offset + kExperts * 3 * bytes);
    scales = std::make_unique<Zeros>(model.hidden * model.intermediate / 32 * 4);
    std::byte* next = weights->data + offset;
    const auto take = [&](int64_t k) {
      Matrix m = like;
      m.data = next, next += bytes;
      m.row_bytes = m.row_stride = k * m.bits() / 8;
      m.scales = scales->data, m.scale_stride = k / 32 * 4;
      return m;
    };
    for (int64_t e = 0; e < kExperts; ++e) {
      Expert expert;
      expert.gate = take(model.hidden), expert.up = take(model.hidden), expert.down = take(model.intermediate);
      const auto at = [&](const Matrix& m) { return interleaved(m.data, nodes, 4096); };
      placements.push_back({at(expert.gate), at(expert.up), at(expert.down)});
      // Pages are counted from the beginning of all.
      for (Placement* place : {&placements.back().gate, &placements.back().up, &placements.back().down})
        place->origin = reinterpret_cast<uintptr_t>(weights->data);
      p.experts.push_back(expert);
    }
  }

  // The reads of `tokens` tokens, each of which chooses the expert `chosen` or, if that is -1, they in turns.
  std::vector<Read> reads(const NumaPlan* plan, int64_t tokens, int64_t chosen) {
    x.assign(static_cast<size_t>(tokens * p.hidden_size), 1.0f);
    logits.assign(static_cast<size_t>(tokens * kExperts), 0.0f);
    for (int64_t t = 0; t < tokens; ++t) logits[t * kExperts + (chosen < 0 ? t % kExperts : chosen)] = 1.0f;
    Call call;
    call.tokens = tokens, call.hidden_states = x.data(), call.router_logits = logits.data(), call.numa = plan;
    return Outcome(p, select_kernels(choose_isa().isa), call, {1, fair_node}, 1 << 18).reads;
  }

  double locality(const std::vector<Read>& reads) const {
    const Placement& placement = placements[0].gate;  // of all
    int64_t local = 0, all = 0;
    for (const Read& read : reads) {
      const auto begin = reinterpret_cast<uintptr_t>(read.address);
      const uintptr_t end = begin + static_cast<uintptr_t>(read.bytes);
      for (uintptr_t at = begin, next; at < end; at = next) {
        next = std::min(end, at / 4096 * 4096 + 4096);
        if (placement.node_of(at) == read.node) local += static_cast<int64_t>(next - at);
      }
      all += read.bytes;
    }
    return static_cast<double>(local) / static_cast<double>(all);
  }
};

void test_locality() {
  for (const Model& model : kModels)
    for (const WeightFormat format : {WeightFormat::kFloat, WeightFormat::kUint8, WeightFormat::kInt4})
      for (const int nodes : {2, 4})
        for (const int64_t offset : {0, 1416}) {
          g_nodes = nodes;
          BigLayer layer(model, format, nodes, offset);
          const auto plan = make_numa_plan(layer.p, nodes, layer.placements);
          if (plan == nullptr) {
            CHECK(model.hidden == 2880, "%s falls back to the plain plan", model.name);
            continue;
          }
          const double placed = layer.locality(layer.reads(plan.get(), 2, -1));
          CHECK(placed >= 0.95, "%s, format %d, %d nodes: %.4f of the bytes are local", model.name,
                static_cast<int>(format), nodes, placed);
          std::printf("%s, format %d, %d nodes, offset %ld: %.1f %% of the bytes are local\n", model.name,
                      static_cast<int>(format), nodes, (long)offset, 100 * placed);
        }
}

// All tokens choose an expert whose pages are on one node: workers of the other node take half of the work.
void test_stealing() {
  g_nodes = 2;
  BigLayer layer(kModels[0], WeightFormat::kInt4, 1, 0);
  for (ExpertPlacement& expert : layer.placements)
    for (Placement* place : {&expert.gate, &expert.up, &expert.down})
      place->order[0] = static_cast<uint8_t>(&expert - layer.placements.data());
  const auto plan = make_numa_plan(layer.p, 2, layer.placements);
  CHECK(plan != nullptr && !plan->segments, "one node for each expert");
  for (const int chosen : {0, 1}) {
    int64_t bytes[2] = {};
    for (const Read& read : layer.reads(plan.get(), 3, chosen)) bytes[read.node] += read.bytes;
    const double share = static_cast<double>(bytes[1 - chosen]) / static_cast<double>(bytes[0] + bytes[1]);
    CHECK(share > 0.45 && share < 0.55, "%.3f of the bytes are read by the other node", share);
  }
}

void test_plans() {
  BigLayer layer(kModels[0], WeightFormat::kFloat, 2, 0);
  CHECK(make_numa_plan(layer.p, 1, layer.placements) == nullptr, "one node");
  const auto plan = make_numa_plan(layer.p, 2, layer.placements);
  CHECK(plan != nullptr && plan->partitions.size() <= 3, "experts of one tensor share partitions");
  CHECK(plan->locality == 1.0 && !plan->segments, "rows of one page");
  g_nodes = 2;
  const double plain = layer.locality(layer.reads(nullptr, 2, -1));
  CHECK(plain < 0.55, "the plain plan reads %.3f of the bytes locally", plain);
  CHECK(uses_numa(plan.get(), layer.p, 16) && !uses_numa(plan.get(), layer.p, 1 << 20), "large batches: plain plan");
  for (ExpertPlacement& expert : layer.placements) expert = {};
  CHECK(make_numa_plan(layer.p, 2, layer.placements) == nullptr, "nothing is known");
  BigLayer same(kModels[0], WeightFormat::kFloat, 1, 0);
  CHECK(make_numa_plan(same.p, 2, same.placements) == nullptr, "all on one node");
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  int kinds[3] = {};
  for (int round = 0; round < rounds; ++round) {
    ++kinds[test_layer(round)];
    test_copies(round);
  }
  CHECK(rounds < 50 || (kinds[1] > rounds / 5 && kinds[2] > 0), "%d with segments, %d without", kinds[1], kinds[2]);
  test_plans();
  test_locality();
  test_stealing();
  std::printf("numa: passed, %d layers, %d with segments, %d without\n", rounds, kinds[1], kinds[2]);
}
