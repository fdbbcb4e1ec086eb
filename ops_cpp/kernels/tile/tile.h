// Kernel family `tile`: rows of weights times tokens in AMX tiles, on the weights as they lie in the model.
//
// The product is turned round: C^T = W X^T. A tile of W is 16 rows of 64 bytes, loaded from the model with the rows'
// stride; the tokens are packed, while they are gathered and converted, so that they are the other operand. Results
// have a row for each weight row and a column for each token.
//
// A panel is up to kPanelTokens tokens of one expert, opaque but for this: of n tokens it has groups of 32 bits, as
// [groups][n], so that the values of ONE token lie as a plain vector. A group is two bfloat16 values, or four int8
// codes of `qdot`, along k.
//
//   bf16   tokens are rounded to bfloat16, as `terms` of them: 1, or 2 that add up to the value within 2^-16 of it.
//          Weights are bfloat16. Products are exact and added up in float32; the order depends on k and `terms` alone.
//          Subnormal inputs and sums count as zero. With two terms, a weight that is infinite makes NaN.
//   int8   tokens and results are, bit for bit, those of the family `qdot` with units of 32 (qdot.h has the formula).
//
// A token's results are the same bits in every batch and for every split of rows and panels (which NaN it is, is not
// specified). Nothing is read outside the rows and the panels.
//
// Tile configuration is state of the thread: `multiply` loads one and leaves it; callers put back what was there
// before (runtime/amx.h). Entries other than the portable ones need AMX besides their ISA, which is that of their
// vector part.
#pragma once

#include "kernels/qdot/qdot.h"
#include "kernels/types.h"

namespace hina {

constexpr int kTileRows = 16;
constexpr int kPanelTokens = 16;
constexpr int kMaxRowTiles = 6;  // that share one load of a panel's tile (int8)

// Rows of one matrix, row r at first + r * stride.
struct TileRows {
  const void* first = nullptr;
  int64_t stride = 0;
  int n = 0;
  const float* scales = nullptr;       // [n][units], quantised formats only
  const float* zero_points = nullptr;  // [n][units]; nullptr: the middle code, 128, 8 or (MXFP4) 12
};

struct TileKernel {
  const char* name;
  Isa isa;
  WeightFormat format;  // kFloat: bfloat16
  int terms;            // 0: int8
  int from_tokens;      // of one expert: from so many on it is faster than dot or qdot, as measured

  // Bytes of a panel of n tokens of k values; a multiple of 4 n, and not more than n times that of one token.
  int64_t (*panel_bytes)(int64_t k, int n);

  // Packs n tokens of k values at any address, multiplied by weights[t] unless `weights` is nullptr.
  void (*pack)(const float* const* tokens, const float* weights, int n, int64_t k, void* panel);

  // Packs what the first projection left: values[i * n + t] is value from + i of token t, for i < count. `from` is a
  // multiple of 16 (bf16) or 32 (int8), and from + count is one too or is k, in which case the padding is written as
  // well. Parts of a panel may be written by different threads.
  void (*pack_rows)(const float* values, int count, int n, int64_t from, int64_t k, void* panel);

  // Four-bit rows become rows of bytes, 64-byte aligned, `stride` (a multiple of 32) bytes apart, padded with what
  // multiplies to nothing. nullptr: rows are multiplied as they lie. `centred`: no zero points are given.
  void (*unpack)(const void* const* rows, int n, int64_t row_bytes, int64_t k, bool centred, void* bytes,
                 int64_t stride);

  // Both `parts` (the second may have no rows) times n_tokens >= 1 tokens: 16 in each panel but the last. Panel p
  // leaves its results at out + p * 16 * rows, as [rows of both parts][tokens of the panel].
  void (*multiply)(const TileRows* parts, const void* const* panels, int n_tokens, int64_t k, float* out);
};

}  // namespace hina
