// Kernel family `dot`: many row-by-token dot products, the arithmetic of every projection.
//
//   out[t * out_stride + r] = sum over i of rows[r][i] * tokens[t][i],   0 <= r < n_rows, 0 <= t < n_tokens
//
// A row is `k` elements of the weight's type, at any byte alignment; a token is `k` elements of the token type
// (float32, or bfloat16 where the CPU multiplies it). Rows are given by pointer, so halves, interleaved rows and rows
// of one NUMA page class are all the same to a kernel.
//
// Contract
// - Products are accumulated in float32; with bfloat16 tokens, subnormal values, products and sums count as zero. The
//   order over i depends on the ISA and on k alone, never on n_rows, n_tokens or the place in the tile: a token's
//   result is the same bits in every batch and for every split of the work (which NaN it is, of several that meet, is
//   not specified).
// - Nothing is read outside rows[r][0..k) and tokens[t][0..k), nothing written but the n_rows x n_tokens results.
// - n_rows >= 0, n_tokens >= 0, k >= 1.
#pragma once

#include "kernels/types.h"

namespace hina {

using DotFn = void (*)(const void* const* rows, int n_rows, const void* const* tokens, int n_tokens, int64_t k,
                       float* out, int64_t out_stride);

struct DotKernel {
  const char* name;
  Isa isa;
  DataType weight_type;
  DataType token_type;
  DotFn fn;
};

}  // namespace hina
