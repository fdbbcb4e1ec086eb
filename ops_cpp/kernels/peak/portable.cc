// peak, portable: what the compiler makes of plain code for the oldest CPU of the architecture.
#include "kernels/peak/opaque.h"
#include "kernels/peak/peak.h"

namespace hina {
namespace {

typedef float Vector __attribute__((vector_size(16)));

constexpr int kChains = 8;

double float32(int64_t steps) {
  Vector a = {2, 2, 2, 2}, b = {3, 3, 3, 3}, acc[kChains] = {};
  HINA_OPAQUE(b);
  HINA_UNROLL
  for (int i = 0; i < kChains; ++i) HINA_OPAQUE(acc[i]);
  for (int64_t s = 0; s < steps; ++s) {
    HINA_UNROLL
    for (int i = 0; i < kChains; ++i) {
      HINA_OPAQUE(a);
      acc[i] += a * b;
    }
  }
  HINA_UNROLL
  for (int i = 1; i < kChains; ++i) acc[0] += acc[i];
  double sum = 0;
  for (int lane = 0; lane < 4; ++lane) sum += static_cast<double>(acc[0][lane]);
  return sum;
}

// A dot product of bytes in the L1 cache: the compiler knows its pattern, but it has no registers to keep factors in.
constexpr int kBytes = 256;

double int8(int64_t steps) {
  uint8_t a[kBytes];
  int8_t b[kBytes];
  for (int i = 0; i < kBytes; ++i) a[i] = 2, b[i] = 3;
  double sum = 0;
  for (int64_t s = 0; s < steps; ++s) {
    __asm__ volatile("" ::"r"(a), "r"(b) : "memory");
    int32_t dot = 0;
    for (int i = 0; i < kBytes; ++i) dot += a[i] * b[i];
    sum += dot;
  }
  return sum;
}

}  // namespace

const PeakKernel kPeakPortable[2] = {
    {"peak_float32_portable", Isa::kPortable, PeakType::kFloat32, kChains * 4, float32},
    {"peak_int8_portable", Isa::kPortable, PeakType::kInt8, kBytes, int8},
};

}  // namespace hina
