#include "numa/copies.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "moe/blocking.h"
#include "numa/blocks.h"
#include "runtime/placement.h"

namespace hina {
namespace {

constexpr int kPreferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h; MPOL_BIND would end the process on a full node
constexpr int kMostNodes = 1024;

template <typename Fn>
void each_block(const Params& params, Fn fn) {
  for (int64_t e = 0; e < expert_count(params); ++e) {
    const ExpertBlocks blocks = blocks_of(params, e);
    for (const Block& block : blocks.first) fn(e, block);
    fn(e, blocks.down);
  }
}

// Cuts a mapping into copies, each aligned.
struct Arena {
  std::byte* next;

  const std::byte* put(std::span<const std::byte> from) {
    if (from.empty()) return nullptr;
    std::byte* to = next;
    std::memcpy(to, from.data(), from.size());
    next += aligned(static_cast<int64_t>(from.size()));
    return to;
  }
};

// `part` of the matrix `from`, as it lies in `to`.
Matrix moved(Matrix part, const Matrix& from, const Matrix& to) {
  part.data = to.data + (part.data - from.data);
  if (part.scales != nullptr) part.scales = to.scales + (part.scales - from.scales);
  if (part.zero_points != nullptr) part.zero_points = to.zero_points + (part.zero_points - from.zero_points);
  return part;
}

// The experts of `copy`, so far those of `params`, with all their weights put into `arena`.
void put_weights(const Params& params, Arena arena, Params& copy) {
  each_block(params, [&](int64_t e, const Block& block) {
    const Expert& from = expert_at(params, e);
    Expert& expert = e == params.num_experts ? copy.shared : copy.experts[static_cast<size_t>(e)];
    Matrix to = *block.matrix;
    to.data = arena.put(block.data());
    to.scales = arena.put(block.scales());
    to.zero_points = arena.put(block.zero_points());
    if (block.matrix == &from.gate_up) {
      expert.gate_up = to;
      expert.gate = moved(from.gate, from.gate_up, to);
      expert.up = moved(from.up, from.gate_up, to);
    } else {
      (block.matrix == &from.gate ? expert.gate : block.matrix == &from.up ? expert.up : expert.down) = to;
    }
  });
}

}  // namespace

int prefer_node(void* data, size_t bytes, int node) {
  if (node < 0 || node >= kMostNodes) return EINVAL;
  constexpr int kBits = 8 * sizeof(unsigned long);
  unsigned long mask[kMostNodes / kBits] = {};
  mask[node / kBits] = 1UL << (node % kBits);
  return syscall(SYS_mbind, data, bytes, kPreferred, mask, kMostNodes + 1, 0) < 0 ? errno : 0;
}

int64_t bytes_of_copy(const Params& params) {
  int64_t bytes = 0;
  each_block(params, [&](int64_t, const Block& block) {
    for (const auto& piece : {block.data(), block.scales(), block.zero_points()})
      bytes += aligned(static_cast<int64_t>(piece.size()));
  });
  return bytes;
}

void Copies::Unmap::operator()(std::byte* data) const { munmap(data, bytes); }

std::string Copies::make(const Params& params, std::span<const int> nodes, PreferNode prefer_node) {
  std::string error = try_to_make(params, nodes, prefer_node);
  if (!error.empty()) owned_.clear(), memory_.clear();
  for (const auto& copy : owned_) pointers_.push_back(copy.get());
  return error;
}

std::string Copies::try_to_make(const Params& params, std::span<const int> nodes, PreferNode prefer_node) {
  const size_t bytes = static_cast<size_t>(bytes_of_copy(params));
  for (const int node : nodes) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) return refusal("memory for a copy", errno);
    memory_.emplace_back(static_cast<std::byte*>(data), Unmap{bytes});
    if (const int error = prefer_node(data, bytes, node); error != 0) return refusal("mbind", error);
    madvise(data, bytes, MADV_HUGEPAGE);  // fewer TLB misses, where the kernel has them
    auto copy = std::make_unique<Params>(params);
    put_weights(params, {static_cast<std::byte*>(data)}, *copy);
    mprotect(data, bytes, PROT_READ);
    owned_.push_back(std::move(copy));
  }
  return {};
}

}  // namespace hina
