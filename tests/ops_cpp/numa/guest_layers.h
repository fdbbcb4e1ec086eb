// Layers with the shapes of real models, in memory whose pages are taken from chosen nodes.
#pragma once

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "../native/check.h"
#include "moe/params.h"

namespace guest {

using namespace hina;

constexpr uintptr_t kPageBytes = 4096;

struct Shape {
  const char* name;
  int64_t hidden, intermediate;
};
constexpr Shape kQwen36{"Qwen3.6-35B", 2048, 512};
constexpr Shape kShapes[] = {
    kQwen36, {"Qwen3-30B", 2048, 768}, {"DeepSeek-V3", 7168, 2048}, {"Mixtral", 4096, 14336}, {"gpt-oss", 2880, 2880}};

enum class Weights { kBf16, kInt8, kInt4 };
constexpr const char* kWeightNames[] = {"bf16", "int8", "int4"};

// Memory for weights, whose pages are not huge and are taken from nodes as `policy` says.
class Pages {
 public:
  Pages(int64_t bytes, int policy, unsigned long nodes) : bytes_(static_cast<size_t>(bytes)) {
    void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(data != MAP_FAILED, "mmap of %zu bytes", bytes_);
    data_ = static_cast<std::byte*>(data);
    CHECK(madvise(data, bytes_, MADV_NOHUGEPAGE) == 0, "madvise");
    CHECK(syscall(SYS_set_mempolicy, policy, &nodes, 64) == 0, "set_mempolicy: %s", std::strerror(errno));
    fill();
    CHECK(syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0) == 0, "set_mempolicy");
  }
  ~Pages() { munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }

  // Moves a part, page by page.
  void bind(size_t from, size_t bytes, int node) {
    unsigned long mask = 1UL << node;
    CHECK(syscall(SYS_mbind, data_ + from, bytes, MPOL_BIND, &mask, 64, MPOL_MF_MOVE) == 0, "mbind");
  }

 private:
  // Small bfloat16 values, which are also codes of any kind.
  void fill() {
    std::mt19937 random(3);
    std::vector<uint16_t> some(kPageBytes * 16 + 77);
    for (uint16_t& value : some) value = static_cast<uint16_t>((random() & 0x80ff) | 0x3c00);  // 2^-7 to 2^-5
    for (size_t at = 0; at < bytes_; at += some.size() * 2)
      std::memcpy(data_ + at, some.data(), std::min(some.size() * 2, bytes_ - at));
  }

  std::byte* data_ = nullptr;
  size_t bytes_;
};

inline int64_t row_bytes(Weights weights, int64_t k) {
  return weights == Weights::kBf16 ? 2 * k : weights == Weights::kInt8 ? k : k / 2;
}

inline int64_t expert_bytes(const Shape& s, Weights weights) {
  return 2 * s.intermediate * row_bytes(weights, s.hidden) + s.hidden * row_bytes(weights, s.intermediate);
}

constexpr int64_t kRoom = 100 << 20;  // bytes of the weights of a layer, unless one expert needs more

// Experts that make up so many bytes.
inline int64_t experts_in(const Shape& s, Weights weights, int64_t bytes) {
  return std::clamp<int64_t>(bytes / expert_bytes(s, weights), 1, 8);
}

struct Layer {
  Params params;
  std::vector<float> scales;

  // All gate matrices, then all of up and of down, as tensors lie in a model file; `experts_apart` expert after expert.
  Layer(const Shape& s, Weights weights, int64_t experts, std::byte* at, bool experts_apart = false) {
    params.hidden_size = s.hidden, params.intermediate_size = s.intermediate;
    params.num_experts = experts, params.top_k = std::max<int64_t>(1, experts / 2);
    params.router.input = RouterInput::kTopK;
    params.int8_activations = true;
    params.experts.resize(static_cast<size_t>(experts));
    scales.assign(static_cast<size_t>(std::max(s.hidden, s.intermediate) * std::max(s.hidden, s.intermediate) / 32),
                  1e-3f);
    const auto take = [&](Matrix& m, int64_t rows, int64_t k) {
      m = matrix(weights, k);
      m.data = at;
      at += rows * m.row_stride;
    };
    for (Expert& e : params.experts) {
      take(e.gate, s.intermediate, s.hidden);
      if (experts_apart) take(e.up, s.intermediate, s.hidden), take(e.down, s.hidden, s.intermediate);
    }
    for (Expert& e : params.experts)
      if (!experts_apart) take(e.up, s.intermediate, s.hidden);
    for (Expert& e : params.experts)
      if (!experts_apart) take(e.down, s.hidden, s.intermediate);
  }

  Matrix matrix(Weights weights, int64_t k) const {
    Matrix m;
    m.type = DataType::kBFloat16;
    m.row_stride = row_bytes(weights, k);
    if (weights == Weights::kBf16) return m;
    m.format = weights == Weights::kInt8 ? WeightFormat::kUint8 : WeightFormat::kInt4;
    m.row_bytes = m.row_stride;
    m.block = weights == Weights::kInt8 ? 0 : 32;
    m.scales = reinterpret_cast<const std::byte*>(scales.data());
    m.scale_stride = m.block == 0 ? 4 : k / 32 * 4;
    return m;
  }
};

}  // namespace guest
