// Kernel family `dequantise`: a row of quantised weights as float32, for activations that stay floating point.
//
//   out[i] = (code[i] - zero_points[i / unit]) * scales[i / unit],   0 <= i < k
//
// Codes are those of WeightFormat (types.h); each result is rounded twice at most (the difference is exact for whole
// zero points) and is the same bits on every ISA. Nothing is read outside the bytes of k codes, ceil(k / unit) scales
// and zero points. `unit` is 16 or 32.
#pragma once

#include "kernels/types.h"

namespace hina {

using DequantiseFn = void (*)(const void* values, int64_t k, int unit, const float* scales, const float* zero_points,
                              float* out);

struct DequantiseKernel {
  const char* name;
  Isa isa;
  WeightFormat format;
  DequantiseFn fn;
};

}  // namespace hina
