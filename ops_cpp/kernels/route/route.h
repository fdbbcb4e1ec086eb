// Kernel family `route`: from the logits of one token to the scores of the `n` experts, and the best of them.
//
//   softmax  y[i] = exp(x[i] - max) / sum. A row with NaN, +infinity or nothing but -infinity becomes all NaN, as in
//            ONNX Runtime; -infinity beside finite values becomes 0. `y` may be `x`.
//   sigmoid  y[i] = 1 / (1 + exp(-x[i])); 0 where exp exceeds float32. `y` may be `x`.
//   top_k    ids of the k largest, largest first, 0 < k <= n. NaN is larger than any number, 0 and -0 are equal; among
//            equal ones the lowest id wins, or the highest. Every entry finds the same ids.
#pragma once

#include "kernels/types.h"

namespace hina {

using ScoreFn = void (*)(const float* x, float* y, int64_t n);
using TopKFn = void (*)(const float* scores, int64_t n, int64_t k, bool ties_to_highest, int32_t* ids);

struct RouteKernel {
  const char* name;
  Isa isa;
  ScoreFn softmax;
  ScoreFn sigmoid;
  TopKFn top_k;
};

}  // namespace hina
