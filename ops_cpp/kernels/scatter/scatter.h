// Kernel family `scatter`: adds a block of results, which has a row for each feature, to the sums of its tokens.
//
//   sums[t][r] += weights[t] * values[r * n + t],   0 <= r < rows, 0 <= t < n
//
// The product is rounded, then the sum, in every entry. rows >= 0, n >= 1.
#pragma once

#include "kernels/types.h"

namespace hina {

using ScatterFn = void (*)(const float* values, int rows, int n, const float* weights, float* const* sums);

struct ScatterKernel {
  const char* name;
  Isa isa;
  ScatterFn fn;
};

}  // namespace hina
