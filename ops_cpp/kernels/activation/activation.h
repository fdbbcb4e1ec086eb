// Kernel family `activation`: what lies between the two projections of an expert, elementwise over `n` values.
//
//   gated (up != nullptr):  out[i] = act(min(gate[i], limit)) * (clip(up[i], -limit, limit) + beta)
//   plain (up == nullptr):  out[i] = act(gate[i])
//
// silu(g) = g / (1 + exp(-alpha * g)). NaN stays NaN, also under a limit, as in ONNX Clip. `out` may be `gate`.
#pragma once

#include "kernels/types.h"

namespace hina {

struct ActivationParams {
  float alpha;
  float beta;
  float limit;  // +infinity: none
};

using ActivationFn = void (*)(const ActivationParams& params, const float* gate, const float* up, float* out,
                              int64_t n);

struct ActivationKernel {
  const char* name;
  Isa isa;
  Activation activation;
  ActivationFn fn;
};

}  // namespace hina
