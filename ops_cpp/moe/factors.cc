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

int64_t factor_bytes(DataType type, int64_t n) {
  if (type == DataType::kUint4) return (n + 1) / 2;
  return type == DataType::kFloat32 ? 4 * n : type < DataType::kUint8 ? 2 * n : n;
}

// Values of rows, each of which stands for `repeat` units. Row i of the matrix begins at data + i * stride.
void expand_rows(const RowBlock& rows, const std::byte* data, int64_t stride, DataType type, int64_t units,
                 int64_t repeat, const KernelSet& kernels, float* out) {
  const WidenFn widen = kernels.widen[static_cast<int>(type)];
  const int64_t blocks = ceil_div(units, repeat);
  // A call for all rows where they lie one after the other: at one token a call for each took a tenth of the time.
  const int64_t bytes = factor_bytes(type, blocks);
  const int64_t count = rows.last - rows.first;
  if (repeat == 1 && stride == bytes && type != DataType::kUint4 && rows.run == 0)
    return widen(data + rows.first * stride, out, count * units);
  for (int64_t r = 0; r < count; ++r, out += units) {
    widen(data + rows.index(r) * stride, out, blocks);
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

Matrix columns_of(const Matrix& matrix, int64_t from, int64_t to, int64_t k) {
  Matrix part = matrix;
  part.data += from * matrix.bits() / 8;
  const int64_t end = to == k && matrix.quantised() ? matrix.row_bytes : to * matrix.bits() / 8;
  part.row_bytes = end - from * matrix.bits() / 8;
  if (!matrix.quantised() || matrix.block == 0) return part;
  part.scales += factor_bytes(matrix.scale_type, from / matrix.block);
  if (part.zero_points != nullptr) part.zero_points += factor_bytes(matrix.zero_point_type, from / matrix.block);
  return part;
}

Factors expand_factors(const RowBlock& rows, int64_t k, const KernelSet& kernels, std::byte* room) {
  const Matrix& matrix = *rows.matrix;
  const int unit = unit_of(matrix);
  const int64_t units = ceil_div(k, unit), all = (rows.last - rows.first) * units;
  const int64_t repeat = matrix.block == 0 ? units : matrix.block / unit;
  auto* scales = reinterpret_cast<float*>(room);
  expand_rows(rows, matrix.scales, matrix.scale_stride, matrix.scale_type, units, repeat, kernels, scales);
  if (matrix.format == WeightFormat::kMxfp4)
    for (int64_t i = 0; i < all; ++i) scales[i] *= 0.5f;
  float* zero_points = scales + all;
  const bool given = matrix.zero_points != nullptr;  // else all rows share one
  if (!given) {
    std::fill_n(zero_points, units, middle_code(matrix.format));
  } else {
    expand_rows(rows, matrix.zero_points, matrix.zero_point_stride, matrix.zero_point_type, units, repeat, kernels,
                zero_points);
    if (matrix.format == WeightFormat::kInt8)
      for (int64_t i = 0; i < all; ++i) zero_points[i] += 128.0f;
  }
  return {scales, zero_points, units, given ? units : 0};
}

}  // namespace hina
