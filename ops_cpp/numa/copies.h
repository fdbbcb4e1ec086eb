// A layer's weights once more on each node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moe/params.h"

namespace hina {

// The system call mbind: pages of [data, data + bytes) that are touched first from now on are to be taken from `node`,
// by the kernel's number, while it has any. Returns 0 or an errno.
using PreferNode = int (*)(void* data, size_t bytes, int node);
int prefer_node(void* data, size_t bytes, int node);

// Bytes of one copy of the experts' weights.
int64_t bytes_of_copy(const Params& params);

class Copies {
 public:
  // One for each of `nodes`, the kernel's numbers. Returns nothing, or why there are none.
  std::string make(const Params& params, std::span<const int> nodes, PreferNode prefer_node);

  bool empty() const { return pointers_.empty(); }
  const Params* const* params() const { return pointers_.data(); }  // [nodes]

 private:
  std::string try_to_make(const Params& params, std::span<const int> nodes, PreferNode prefer_node);

  struct Unmap {
    size_t bytes = 0;
    void operator()(std::byte* data) const;
  };
  std::vector<std::unique_ptr<std::byte, Unmap>> memory_;
  std::vector<std::unique_ptr<const Params>> owned_;
  std::vector<const Params*> pointers_;
};

}  // namespace hina
