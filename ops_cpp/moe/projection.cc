#include "moe/projection.h"

#include <algorithm>

#include "moe/factors.h"

namespace hina {
namespace {

static_assert(kRows <= kMaxQRows && kFewRows <= kMaxFewRows);

// Whether rows are packed for `tokens` tokens.
bool packs(const QDotKernel& qdot, int unit, int64_t tokens) {
  return qdot.few == nullptr || unit != kUnit || tokens >= qdot.pack_from;
}

// Rows of a block for `few`.
int64_t few_rows(const Matrix& matrix, const QDotKernel& qdot) {
  return std::clamp<int64_t>(ceil_div(qdot.streams * kPage, kRows * matrix.row_bytes) * kRows, kRows, kFewRows);
}

QNext next_of(const RowBlock& block) {
  if (block.matrix == nullptr || !block.matrix->quantised()) return {};
  const Matrix& m = *block.matrix;
  const int64_t rows = block.last - block.first;
  QNext next{m.row(block.first), {m.scales + block.first * m.scale_stride, nullptr}, {rows * m.scale_stride, 0}};
  if (m.zero_points == nullptr) return next;
  next.factors[1] = m.zero_points + block.first * m.zero_point_stride;
  next.factor_bytes[1] = rows * m.zero_point_stride;
  return next;
}

}  // namespace

TokenForm token_form(const Matrix& matrix, bool int8_activations, const KernelSet& kernels, DataType type) {
  if (matrix.quantised()) {
    if (!int8_activations) return TokenForm::kFloat32;
    const bool by8 = matrix.format == WeightFormat::kUint8 || matrix.format == WeightFormat::kInt8;
    const bool is_short = unit_of(matrix) == kShortUnit;
    if (by8) return is_short ? TokenForm::kInt8By8Short : TokenForm::kInt8By8;
    return is_short ? TokenForm::kInt8By4Short : TokenForm::kInt8By4;
  }
  const bool bfloat16 = type == DataType::kBFloat16 && matrix.type == DataType::kBFloat16;
  return bfloat16 && kernels.dot_bfloat16 != nullptr ? TokenForm::kBFloat16 : TokenForm::kFloat32;
}

const QDotKernel& qdot_of(TokenForm form, const KernelSet& kernels) {
  const WeightFormat format = form < TokenForm::kInt8By4 ? WeightFormat::kUint8 : WeightFormat::kInt4;
  return kernels.qdot[static_cast<int>(format)];
}

int unit_of(TokenForm form) {
  return form == TokenForm::kInt8By8Short || form == TokenForm::kInt8By4Short ? kShortUnit : kUnit;
}

int64_t token_bytes(TokenForm form, int64_t k, const KernelSet& kernels) {
  if (is_int8(form)) return qdot_of(form, kernels).token_bytes(k, unit_of(form));
  return k * (form == TokenForm::kBFloat16 ? 2 : 4);
}

int64_t rows_at_once(const Matrix& matrix, TokenForm form, int64_t k, int64_t tokens, const KernelSet& kernels) {
  if (!matrix.quantised()) return kRows;
  const QDotKernel& qdot = kernels.qdot[static_cast<int>(matrix.format)];
  if (is_int8(form)) return packs(qdot, unit_of(matrix), tokens) ? kRows : few_rows(matrix, qdot);
  return std::clamp<int64_t>(kDequantiseBytes / (k * 4) / 4 * 4, 4, kRows);
}

int64_t scratch_bytes(const Matrix& matrix, TokenForm form, int64_t k, int64_t tokens, const KernelSet& kernels) {
  const int unit = unit_of(matrix);
  const auto of_rows = [&](int64_t n) {
    const int64_t rows = rows_at_once(matrix, form, k, n, kernels);
    const QDotKernel& qdot = kernels.qdot[static_cast<int>(matrix.format)];
    const int64_t prepared = !is_int8(form)         ? aligned(rows * k * 4)
                             : packs(qdot, unit, n) ? qdot.panel_bytes(k, unit)
                                                    : 0;
    return factors_bytes(rows, k, unit) + prepared;
  };
  return std::max(of_rows(1), of_rows(tokens));
}

Projection::Projection(const RowBlock& rows, const RowBlock& next, int64_t k, TokenForm form, int64_t tokens,
                       const KernelSet& kernels, std::byte* scratch)
    : k_(k), count_(static_cast<int>(rows.last - rows.first)) {
  const Matrix& matrix = *rows.matrix;
  for (int r = 0; r < count_; ++r) rows_[r] = matrix.row(rows.index(r));
  if (!matrix.quantised()) {
    dot_ = form == TokenForm::kBFloat16 ? kernels.dot_bfloat16 : kernels.dot[static_cast<int>(matrix.type)];
    return;
  }
  const int unit = unit_of(matrix);
  const Factors factors = expand_factors(rows, k, kernels, scratch);
  for (int r = 0; r < count_; ++r) scales_[r] = factors.scales_of(r), zero_points_[r] = factors.zero_points_of(r);
  scratch += factors_bytes(count_, k, unit);
  if (!is_int8(form)) {
    dequantise(matrix, kernels, reinterpret_cast<float*>(scratch));
    return;
  }
  qdot_ = &kernels.qdot[static_cast<int>(matrix.format)];
  qrows_ = {rows_, scales_, zero_points_, count_, matrix.row_bytes, unit, next_of(next)};
  if (!packs(*qdot_, unit, tokens)) return;
  qdot_->pack(qrows_, k, scratch);
  panel_ = scratch;
}

void Projection::multiply(const void* const* tokens, int n, float* out, int64_t out_stride) const {
  if (qdot_ == nullptr)
    dot_(rows_, count_, tokens, n, k_, out, out_stride);
  else if (panel_ == nullptr)
    qdot_->few(qrows_, tokens, n, k_, out, out_stride);
  else
    qdot_->many(panel_, count_, qrows_.unit, tokens, n, k_, out, out_stride);
}

void Projection::dequantise(const Matrix& matrix, const KernelSet& kernels, float* room) {
  const DequantiseFn fn = kernels.dequantise[static_cast<int>(matrix.format)];
  for (int r = 0; r < count_; ++r, room += k_) {
    fn(rows_[r], k_, unit_of(matrix), scales_[r], zero_points_[r], room);
    rows_[r] = room;
  }
  dot_ = kernels.dot[static_cast<int>(DataType::kFloat32)];
}

}  // namespace hina
