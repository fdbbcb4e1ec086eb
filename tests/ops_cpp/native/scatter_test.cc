// Every entry of the family `scatter` that this CPU can run, between guard pages: the bits of its definition.
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/dispatch.h"
#include "runtime/isa.h"

using namespace hina;

namespace {

std::mt19937 g_random(17);

float normal() { return std::normal_distribution<float>()(g_random); }

float* floats(const Guarded& memory) { return reinterpret_cast<float*>(memory.data()); }

// The sums of each token end at a guard page, and so do values and weights.
void test_sums(const ScatterKernel& kernel, int rows, int n) {
  const size_t row_bytes = static_cast<size_t>(rows) * 4;
  const Guarded values(row_bytes * static_cast<size_t>(n)), weights(static_cast<size_t>(n) * 4);
  std::vector<std::unique_ptr<Guarded>> memory;
  std::vector<float*> sums;
  std::vector<float> want;
  for (int t = 0; t < n; ++t) {
    floats(weights)[t] = normal();
    memory.push_back(std::make_unique<Guarded>(row_bytes));
    sums.push_back(floats(*memory.back()));
    for (int r = 0; r < rows; ++r) {
      const float value = floats(values)[r * n + t] = normal();
      const volatile float product = floats(weights)[t] * value;  // volatile: rounded
      sums[t][r] = normal();
      want.push_back(sums[t][r] + product);
    }
  }
  kernel.fn(floats(values), rows, n, floats(weights), sums.data());
  for (int t = 0; t < n; ++t) {
    CHECK(memory[t]->margin_intact(), "%s wrote before the sums", kernel.name);
    CHECK(rows == 0 || std::memcmp(sums[t], want.data() + t * rows, row_bytes) == 0,
          "%s rows=%d n=%d token %d: wrong bits", kernel.name, rows, n, t);
  }
}

}  // namespace

int main() {
  for (const ScatterKernel& kernel : scatter_kernels()) {
    if (kernel.isa > cpu_features().newest) continue;
    for (int rows = 0; rows <= 97; ++rows)
      for (int n = 1; n <= 16; ++n) test_sums(kernel, rows, n);
    test_sums(kernel, 35, 67);
    std::printf("ok %s\n", kernel.name);
  }
  std::printf("scatter: passed\n");
}
