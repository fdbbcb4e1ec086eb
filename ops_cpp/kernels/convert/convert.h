// Kernel family `convert`: float32 from and to a weight or activation type, `n` elements, any alignment.
// `widen` is exact; `narrow` rounds to nearest, ties to even, and overflows to infinity.
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
