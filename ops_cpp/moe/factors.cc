#include "moe/factors.h"

#include <algorithm>

#include "moe/blocking.h"
#include "moe/projection.h"

namespace hina {
namespace {

// Zero point of every code when the model gives none.
float middle_code(WeightFormat format) {
  return format == WeightFormat::kInt4 ? 8.0f : format == WeightFormat::kMxfp4 ? 12.0f : 128.0f;
}

// Values of `rows` rows, each of which stands for `repeat` units.
void expand_rows(const std::byte* data, int64_t stride, DataType type, int count, int64_t units, int64_t repeat,
                 const KernelSet& kernels, float* out) {
  const WidenFn widen = kernels.widen[static_cast<int>(type)];
  const int64_t blocks = ceil_div(units, repeat);
  // A call for all rows where they lie one after the other: at one token a call for each took a tenth of the time.
  const int64_t bytes = type == DataType::kFloat32 ? 4 * blocks : type < DataType::kUint8 ? 2 * blocks : blocks;
  if (repeat == 1 && stride == bytes && type != DataType::kUint4) return widen(data, out, count * units);
  for (int r = 0; r < count; ++r, out += units) {
    widen(data + r * stride, out, blocks);
    // From the last block on, since the values of the first ones lie where their repetitions go.
    for (int64_t b = blocks; repeat > 1 && b-- > 0;)
      std::fill(out + b * repeat, out + std::min((b + 1) * repeat, units), float{out[b]});
  }
}

}  // namespace

int unit_of(const Matrix& matrix) { return matrix.block == kShortUnit ? kShortUnit : kUnit; }

int64_t factors_bytes(int64_t rows, int64_t k, int unit) {
  return aligned((2 * rows * ceil_div(k, unit) + kFactorPad) * 4);
}

Factors expand_factors(const Matrix& matrix, int64_t first, int count, int64_t k, const KernelSet& kernels,
                       std::byte* room) {
  const int unit = unit_of(matrix);
  const int64_t units = ceil_div(k, unit), all = count * units;
  const int64_t repeat = matrix.block == 0 ? units : matrix.block / unit;
  auto* scales = reinterpret_cast<float*>(room);
  expand_rows(matrix.scales + first * matrix.scale_stride, matrix.scale_stride, matrix.scale_type, count, units, repeat,
              kernels, scales);
  if (matrix.format == WeightFormat::kMxfp4)
    for (int64_t i = 0; i < all; ++i) scales[i] *= 0.5f;
  float* zero_points = scales + all;
  const bool given = matrix.zero_points != nullptr;  // else all rows share one
  if (!given) {
    std::fill_n(zero_points, units, middle_code(matrix.format));
  } else {
    expand_rows(matrix.zero_points + first * matrix.zero_point_stride, matrix.zero_point_stride, matrix.zero_point_type,
                count, units, repeat, kernels, zero_points);
    if (matrix.format == WeightFormat::kInt8)
      for (int64_t i = 0; i < all; ++i) zero_points[i] += 128.0f;
  }
  return {scales, zero_points, units, given ? units : 0};
}

}  // namespace hina
