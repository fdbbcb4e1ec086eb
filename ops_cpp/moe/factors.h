// Scales and zero points of a block of quantised rows, as floats: one of each for a unit of k.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dispatch.h"
#include "moe/params.h"

namespace hina {

struct Factors {
  const float* scales;       // [rows][units]
  const float* zero_points;  // [rows][units]; or [units], the middle code, where the model gives none
  int64_t units;
  int64_t zero_point_stride;  // from row to row: units or 0

  const float* scales_of(int row) const { return scales + row * units; }
  const float* zero_points_of(int row) const { return zero_points + row * zero_point_stride; }
};

// Values of a unit of a matrix.
int unit_of(const Matrix& matrix);

// Bytes of the room of `rows` rows, a multiple of 64.
int64_t factors_bytes(int64_t rows, int64_t k, int unit);

// The rows of a matrix of k values without the values before `from` and from `to` on; both are multiples of unit_of(),
// of the block and, where zero points share bytes, of two blocks; or are k.
Matrix columns_of(const Matrix& matrix, int64_t from, int64_t to, int64_t k);

// Of k values of each of the rows.
Factors expand_factors(const RowBlock& rows, int64_t k, const KernelSet& kernels, std::byte* room);

}  // namespace hina
