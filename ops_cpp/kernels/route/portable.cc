// route, portable C++ on the C library's exp: the reference of the family.
#include <cmath>

#include "kernels/route/insertion.h"
#include "kernels/tables.h"

namespace hina {
namespace {

void softmax(const float* x, float* y, int64_t n) {
  float best = x[0];  // which number it is does not matter in a row with NaN: the sum is NaN
  for (int64_t i = 1; i < n; ++i)
    if (x[i] > best) best = x[i];
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum += y[i] = std::exp(x[i] - best);
  for (int64_t i = 0; i < n; ++i) y[i] /= sum;
}

void sigmoid(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = 1.0f / (1.0f + std::exp(-x[i]));
}

}  // namespace

const RouteKernel kRoutePortable[1] = {{"route_portable", Isa::kPortable, softmax, sigmoid, insert_top_k}};

}  // namespace hina
