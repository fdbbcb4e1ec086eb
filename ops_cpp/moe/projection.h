// Products of tokens with a block of rows of one weight matrix, whatever the types of both: chooses the kernel, and
// prepares the rows for it in a worker's scratch memory where that pays.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dispatch.h"
#include "moe/blocking.h"
#include "moe/params.h"

namespace hina {

// How a token lies that a matrix is multiplied with: k values of a float type, or codes as the qdot kernels of the
// matrix's format take them. Formats of as many bits, with blocks alike, take the same tokens.
enum class TokenForm : int { kFloat32 = 0, kBFloat16, kInt8By8, kInt8By8Short, kInt8By4, kInt8By4Short };
constexpr int kTokenFormCount = 6;

// Of a matrix in a layer with activations of `type`.
TokenForm token_form(const Matrix& matrix, bool int8_activations, const KernelSet& kernels, DataType type);

inline bool is_int8(TokenForm form) { return form >= TokenForm::kInt8By8; }

// The kernels that quantise tokens of an int8 form, and the values of a unit.
const QDotKernel& qdot_of(TokenForm form, const KernelSet& kernels);
int unit_of(TokenForm form);

// Bytes from token to token, a multiple of 64 but for the float types.
int64_t token_bytes(TokenForm form, int64_t k, const KernelSet& kernels);

// Bytes of scratch memory, a multiple of 64, that a Projection of a quantised matrix with rows of `k` values takes for
// up to `tokens` tokens.
int64_t scratch_bytes(const Matrix& matrix, TokenForm form, int64_t k, int64_t tokens, const KernelSet& kernels);

// Rows of a block for `tokens` tokens: a multiple of 32 but where rows are dequantised, which are so few that they stay
// in the L1 or L2 cache.
int64_t rows_at_once(const Matrix& matrix, TokenForm form, int64_t k, int64_t tokens, const KernelSet& kernels);

class Projection {
 public:
  // Rows, at most rows_at_once(), for `tokens` tokens in all; `next` is the block that this thread will probably read
  // after them, or none. `scratch` is 64-byte aligned, of scratch_bytes(); plain rows need none.
  Projection(const RowBlock& rows, const RowBlock& next, int64_t k, TokenForm form, int64_t tokens,
             const KernelSet& kernels, std::byte* scratch);
  Projection(const Projection&) = delete;
  Projection& operator=(const Projection&) = delete;

  // out[t * out_stride + r] for a chunk of the tokens, each in the matrix's form.
  void multiply(const void* const* tokens, int n, float* out, int64_t out_stride) const;

 private:
  void dequantise(const Matrix& matrix, const KernelSet& kernels, float* room);

  int64_t k_;
  int count_;
  const void* rows_[kFewRows];
  DotFn dot_ = nullptr;
  const QDotKernel* qdot_ = nullptr;
  QRows qrows_{};
  const float* scales_[kFewRows];
  const float* zero_points_[kFewRows];
  const void* panel_ = nullptr;
};

}  // namespace hina
