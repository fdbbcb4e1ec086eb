// Kernel family `peak`: loops of nothing but arithmetic on registers, the most that one core can do in an instruction
// set. Benchmarks say which share of it a layer reaches.
//
// Every product of a loop is kPeakProduct and every loop returns the exact sum of its products, so that its count of
// multiply-adds can be proven before it is timed.
#pragma once

#include "kernels/types.h"

namespace hina {

constexpr int kPeakProduct = 6;                                // 2 * 3
constexpr int64_t kPeakSteps = 1 << 15;                        // at most: float32 sums are exact up to here
enum class PeakType : int { kFloat32 = 0, kBFloat16, kInt8 };  // of the factors

struct PeakKernel {
  const char* name;
  Isa isa;
  PeakType type;
  int64_t multiply_adds;  // of one step; each is two operations
  double (*sum)(int64_t steps);
};

extern const PeakKernel kPeakPortable[2];
extern const PeakKernel kPeakAvx2[3];
extern const PeakKernel kPeakAvx512[3];
extern const PeakKernel kPeakAvx512Vnni[1];
extern const PeakKernel kPeakAvx512Bf16[1];
extern const PeakKernel kPeakAmx[2];  // where AMX is usable, besides

}  // namespace hina
