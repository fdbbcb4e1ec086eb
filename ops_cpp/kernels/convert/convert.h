// Kernel family `convert`: float32 from and to the type of a tensor, `n` elements, any alignment. `widen` is exact and
// takes every DataType; `narrow` takes the float types (nullptr for others), rounds to nearest, ties to even, and
// overflows to infinity.
#pragma once

#include "kernels/types.h"

namespace hina {

using WidenFn = void (*)(const void* source, float* target, int64_t n);
using NarrowFn = void (*)(const float* source, void* target, int64_t n);

struct ConvertKernel {
  const char* name;
  Isa isa;
  DataType type;
  WidenFn widen;
  NarrowFn narrow;
};

}  // namespace hina
