// activation, portable C++ on the C library's exp, erf and tanh: the reference of the family.
#include <cmath>

#include "kernels/tables.h"

namespace hina {
namespace {

template <Activation activation>
float act(float g, float alpha) {
  switch (activation) {
    case Activation::kSilu:
      return g / (1.0f + std::exp(-alpha * g));
    case Activation::kGelu:
      return 0.5f * g * (1.0f + std::erf(g * 0.70710678f));
    case Activation::kGeluTanh:
      return 0.5f * g * (1.0f + std::tanh(0.79788456f * (g + 0.044715f * g * g * g)));
    case Activation::kRelu:
      return g < 0.0f ? 0.0f : g;
    case Activation::kRelu2:
      return g < 0.0f ? 0.0f : g * g;
    case Activation::kIdentity:
      return g;
  }
}

// Written so that a NaN fails both comparisons and stays.
float at_most(float value, float limit) { return value > limit ? limit : value; }
float at_least(float value, float limit) { return value < limit ? limit : value; }

template <Activation activation>
void apply(const ActivationParams& params, const float* gate, const float* up, float* out, int64_t n) {
  if (up == nullptr) {
    for (int64_t i = 0; i < n; ++i) out[i] = act<activation>(gate[i], params.alpha);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float g = at_most(gate[i], params.limit);
    const float u = at_least(at_most(up[i], params.limit), -params.limit);
    out[i] = act<activation>(g, params.alpha) * (u + params.beta);
  }
}

}  // namespace

const ActivationKernel kActivationPortable[kActivationCount] = {
    {"silu_portable", Isa::kPortable, Activation::kSilu, apply<Activation::kSilu>},
    {"gelu_portable", Isa::kPortable, Activation::kGelu, apply<Activation::kGelu>},
    {"gelu_tanh_portable", Isa::kPortable, Activation::kGeluTanh, apply<Activation::kGeluTanh>},
    {"relu_portable", Isa::kPortable, Activation::kRelu, apply<Activation::kRelu>},
    {"relu2_portable", Isa::kPortable, Activation::kRelu2, apply<Activation::kRelu2>},
    {"identity_portable", Isa::kPortable, Activation::kIdentity, apply<Activation::kIdentity>},
};

}  // namespace hina
