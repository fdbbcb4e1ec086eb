#include "moe/workspace.h"

#include <algorithm>
#include <limits>

#include "moe/blocking.h"

namespace hina {
namespace {

// Hands out pieces of one block of memory. With a null base it only measures.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    int64_t bytes = 0, end = 0;
    if (__builtin_mul_overflow(count, static_cast<int64_t>(sizeof(T)), &bytes) ||
        __builtin_add_overflow(bytes, 63, &bytes) || __builtin_add_overflow(used_, bytes & ~int64_t{63}, &end)) {
      overflow_ = true;
      return nullptr;
    }
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ = end;
    return piece;
  }

  int64_t used() const { return overflow_ ? -1 : used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
  bool overflow_ = false;
};

int64_t longest_row(const Params& params) {
  return std::max({params.hidden_size, params.intermediate_size, params.shared_intermediate_size});
}

Workspace take_all(Carver& carver, const Params& params, const Call& call, int workers) {
  const int64_t tokens = call.tokens, experts = params.num_experts, k = params.top_k;
  const int64_t shared_tokens = params.shared_intermediate_size > 0 ? tokens : 0;
  const int64_t slots = times(tokens, k + (shared_tokens > 0 ? 1 : 0));
  Workspace w;
  if (call.type != DataType::kFloat32) {
    w.x = carver.take<float>(times(tokens, params.hidden_size));
    w.sum = carver.take<float>(times(tokens, params.hidden_size));
  }
  w.logits = carver.take<float>(params.router.input == RouterInput::kTopK ? 0 : times(tokens, experts));
  w.ids = carver.take<int32_t>(times(tokens, k));
  w.weights = carver.take<float>(times(tokens, k));
  w.shared_weights = carver.take<float>(shared_tokens);
  w.plan.first = {carver.take<int64_t>(experts + 2), static_cast<size_t>(experts + 2)};
  w.plan.token = {carver.take<int32_t>(slots), static_cast<size_t>(slots)};
  w.plan.weight = {carver.take<float>(slots), static_cast<size_t>(slots)};
  w.plan.active = {carver.take<int32_t>(experts + 1), static_cast<size_t>(experts + 1)};
  w.hidden = carver.take<float>(times(times(tokens, k), params.intermediate_size));
  w.shared_hidden = carver.take<float>(times(shared_tokens, params.shared_intermediate_size));
  w.logits_left = carver.take<Countdown>(ceil_div(tokens, kTokenBlock));
  w.fc1_left = carver.take<Countdown>(experts + 1);
  if (params.any_narrow_weight && tokens >= kWidenFrom) w.rows = carver.take<float>(block_floats(params) * workers);
  if (params.weights_on_input)
    w.scaled = carver.take<float>(times(chunk_of(params.hidden_size) * workers, params.hidden_size));
  w.tile = carver.take<float>(int64_t{kMaxChunk} * kRows * workers);
  w.scores = carver.take<float>(3 * experts * workers);
  w.group_ids = carver.take<int32_t>(experts * workers);
  return w;
}

}  // namespace

int64_t block_floats(const Params& params) { return std::min(kRows * longest_row(params), kWidenBytes / 4); }

int64_t times(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}

int64_t tokens_at_once(const Params& params, const Call& call) {
  if (call.tokens_at_once > 0) return call.tokens_at_once;
  const int64_t narrow = call.type == DataType::kFloat32 ? 0 : 2 * params.hidden_size;
  const int64_t floats = times(params.top_k, params.intermediate_size) + params.shared_intermediate_size + narrow +
                         params.num_experts + 4 * params.top_k;
  return std::max(kPieceBytes / 4 / floats, kLeastPiece);
}

int64_t workspace_bytes(const Params& params, const Call& call, int workers) {
  Carver carver(nullptr);
  Call piece = call;
  piece.tokens = std::min(call.tokens, tokens_at_once(params, call));
  take_all(carver, params, piece, workers);
  return carver.used();
}

Workspace carve(void* memory, const Params& params, const Call& call, int workers) {
  Carver carver(memory);
  return take_all(carver, params, call, workers);
}

}  // namespace hina
