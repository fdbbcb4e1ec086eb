// scatter, portable C++: the reference of the family.
#include "kernels/tables.h"

namespace hina {
namespace {

void scatter(const float* values, int rows, int n, const float* weights, float* const* sums) {
  for (int t = 0; t < n; ++t)
    for (int r = 0; r < rows; ++r) sums[t][r] += weights[t] * values[r * n + t];
}

}  // namespace

const ScatterKernel kScatterPortable[1] = {{"scatter_portable", Isa::kPortable, scatter}};

}  // namespace hina
