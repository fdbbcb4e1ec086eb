// Whole layers on random sizes and rules: the same bits for 1, 2 and 4 threads and for any order of the tokens'
// company; nothing read from the workspace before it is written; every buffer exactly as long as it must be (for the
// sanitizers).
#include <limits>

#include "layers.h"

namespace {

void test_layer(int round, KernelSet kernels) {
  Buffers buffers;
  const Params p = random_layer(buffers);
  std::vector<int64_t> ids;
  const Call call = random_call(buffers, p, pick(0, 1) ? pick(0, 4) : pick(0, 150), ids);
  const int64_t row = p.hidden_size * (call.type == DataType::kFloat32 ? 4 : 2);

  std::vector<std::byte> first(static_cast<size_t>(call.tokens * row));
  std::vector<int64_t> counts(static_cast<size_t>(p.num_experts));
  CHECK(run(p, kernels, call, Threads{1}, first, counts).empty(), "round %d", round);
  int64_t total = 0;
  for (const int64_t c : counts) total += c;
  CHECK(total == call.tokens * p.top_k, "round %d: counts add up to %ld", round, (long)total);
  for (int64_t i = 0; i < call.tokens * p.hidden_size; ++i) {
    // Mixing weights handed in may be anything, norms may be near zero: only NaN shows an unwritten read.
    CHECK(!std::isnan(value_of(call.type, first.data(), i)), "round %d: element %ld is NaN", round, (long)i);
  }
  for (const int threads : {2, 4}) {
    std::vector<std::byte> again(first.size());
    std::vector<int64_t> again_counts(counts.size());
    CHECK(run(p, kernels, call, Threads{threads}, again, again_counts).empty(), "round %d", round);
    CHECK(again == first && again_counts == counts, "round %d: %d threads change the result", round, threads);
  }
  Params apart = p;  // each of gate and up by itself
  for (Expert& expert : apart.experts) expert.gate_up = {};
  apart.shared.gate_up = {};
  std::vector<std::byte> same(first.size());
  std::vector<int64_t> same_counts(counts.size());
  CHECK(run(apart, kernels, call, Threads{2}, same, same_counts).empty(), "round %d", round);
  CHECK(same == first, "round %d: gate and up rows read in turns change the result", round);
  if (call.tokens == 0) return;
  Call pieces = call;  // in several pieces, the last one shorter
  pieces.tokens_at_once = pick(1, call.tokens);
  std::vector<std::byte> again(first.size());
  std::vector<int64_t> again_counts(counts.size());
  CHECK(run(p, kernels, pieces, Threads{2}, again, again_counts).empty(), "round %d", round);
  CHECK(again == first && again_counts == counts, "round %d: pieces of %ld tokens change the result", round,
        (long)pieces.tokens_at_once);
  const int64_t t = pick(0, call.tokens - 1);  // one token alone
  Call alone = call;
  alone.tokens = 1;
  alone.hidden_states = static_cast<const std::byte*>(call.hidden_states) + t * row;
  alone.router_logits = static_cast<const std::byte*>(call.router_logits) + t * p.num_experts * 4;
  alone.topk_ids = ids.data() + t * p.top_k;
  alone.topk_weights = static_cast<const std::byte*>(call.topk_weights) + t * p.top_k * 4;
  std::vector<std::byte> one(static_cast<size_t>(row));
  CHECK(run(p, kernels, alone, Threads{2}, one, counts).empty(), "round %d", round);
  CHECK(std::memcmp(one.data(), first.data() + t * row, static_cast<size_t>(row)) == 0,
        "round %d: token %ld depends on its batch", round, (long)t);
}

// Where all products are of int8 codes, tiles give the bits that vectors give, from whatever number of tokens on they
// are used.
void test_int8_tiles(int round) {
  Buffers buffers;
  Params p = random_layer(buffers);
  while (!p.experts[0].up.quantised() || !p.experts[0].down.quantised()) p = random_layer(buffers);
  p.int8_activations = true;
  std::vector<int64_t> ids;
  const Call call = random_call(buffers, p, pick(1, 150), ids);
  const KernelSet vectors = select_kernels(choose_isa().isa);
  KernelSet kernels = with_tiles();
  std::copy_n(vectors.tile_bf16, kTileTerms, kernels.tile_bf16);
  for (TileKernel& kernel : kernels.tile_int8) kernel.from_tokens = static_cast<int>(pick(0, 1) ? 1 : pick(2, 20));
  const size_t bytes = static_cast<size_t>(call.tokens * p.hidden_size * (call.type == DataType::kFloat32 ? 4 : 2));
  std::vector<std::byte> by_vectors(bytes), in_tiles(bytes);
  std::vector<int64_t> counts(static_cast<size_t>(p.num_experts));
  CHECK(run(p, vectors, call, Threads{2}, by_vectors, counts).empty(), "round %d", round);
  CHECK(run(p, kernels, call, Threads{2}, in_tiles, counts).empty(), "round %d", round);
  CHECK(in_tiles == by_vectors, "round %d: tiles change the result", round);
}

void test_bad_ids() {
  const KernelSet kernels = select_kernels(choose_isa().isa);
  Buffers buffers;
  Params p = random_layer(buffers);
  p.router.input = RouterInput::kTopK;
  Call call;
  call.tokens = 3;
  call.hidden_states = buffers.filled(call.tokens * p.hidden_size, DataType::kFloat32);
  call.topk_weights = buffers.filled(call.tokens * p.top_k, DataType::kFloat32);
  for (const int64_t bad : {p.num_experts, int64_t{-1}, std::numeric_limits<int64_t>::min(), int64_t{1} << 40}) {
    std::vector<int64_t> ids(static_cast<size_t>(call.tokens * p.top_k), 0);
    ids.back() = bad;
    call.topk_ids = ids.data();
    call.tokens_at_once = pick(0, 1) ? 0 : 2;
    std::vector<std::byte> output(static_cast<size_t>(call.tokens * p.hidden_size * 4));
    std::vector<int64_t> counts(static_cast<size_t>(p.num_experts));
    const std::string error = run(p, kernels, call, Threads{2}, output, counts);
    CHECK(error.find(std::to_string(bad)) != std::string::npos, "%s", error.c_str());
    CHECK(error.find("position " + std::to_string(ids.size() - 1)) != std::string::npos, "%s", error.c_str());
  }
}

// Random bits as logits, NaN and infinities among them, must not lead anything astray.
void test_any_logits() {
  const KernelSet kernels = with_tiles();
  for (int round = 0; round < 100; ++round) {
    Buffers buffers;
    Params p = random_layer(buffers);
    p.router.input = RouterInput::kLogits;
    Call call;
    call.tokens = pick(1, 30);
    call.hidden_states = buffers.filled(call.tokens * p.hidden_size, DataType::kFloat32);
    std::vector<uint32_t> logits(static_cast<size_t>(call.tokens * p.num_experts));
    for (uint32_t& bits : logits) {
      const uint32_t special[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0u};
      bits = pick(0, 1) ? special[pick(0, 3)] : static_cast<uint32_t>(g_random());
    }
    call.router_logits = logits.data();
    std::vector<std::byte> output(static_cast<size_t>(call.tokens * p.hidden_size * 4));
    std::vector<int64_t> counts(static_cast<size_t>(p.num_experts));
    CHECK(run(p, kernels, call, Threads{2}, output, counts).empty(), "round %d", round);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  for (int round = 0; round < rounds; ++round) {
    test_layer(round, pick(0, 1) ? with_tiles() : select_kernels(choose_isa().isa));
    test_int8_tiles(round);
  }
  test_bad_ids();
  test_any_logits();
  std::printf("forward: passed, %d layers, isa %s\n", rounds, isa_name(choose_isa().isa));
}
