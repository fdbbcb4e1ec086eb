// Kernel family `qdot`: dot products of quantised weight rows with tokens quantised to int8.
//
// Along k both are cut into units of `unit` values (32; 16 only where the weights' blocks are that short), the last
// one padded. A token has one scale xs for each unit and codes in [-127, 127]:
//
//   amax = max |x| over the unit          xs = amax / 127
//   code = round_to_even(x * (127 / amax))        sum = the codes' sum
//   amax < 2^-100: xs = 0 and all codes 0;  a NaN or an infinity in the unit: xs = NaN and all codes 0
//
// A weight row has floats for each unit: a scale ws and a zero point zp (several units of one block repeat them).
// With dp = the integer sum of weight code * token code over the unit, a result is, in the order of the units:
//
//   acc = 0;  acc = fma(fma(-zp, sum, float(dp)), ws * xs, acc)
//
// dp, sum and, for whole zero points, the inner fma are exact, so that a result is THE SAME BITS on every ISA, for any
// number of tokens and of rows, and from `few` and from `many` (which NaN it is, is not specified).
//
// Tokens and panels are opaque: how they lie is the business of one kernel entry, all of whose functions agree on it;
// kUint8 and kInt8 of one ISA take the same tokens, and kInt4 and kMxfp4.
//
// Two regimes. `few` reads rows as they lie in the model, each weight byte once, for few tokens; from `streams` places
// of the block at a time, each a run of rows, best of a page or more (ahead.h says why). `pack` rearranges the
// codes of a block of rows, as bytes with rows in the lanes of a vector, into a `panel` that stays in the L2 cache, and
// `many` multiplies it with any number of tokens. `pack_from` is the number of tokens from which the second is faster,
// as measured. `few` is nullptr where an entry has no such kernel, and takes units of 32 only.
//
// Nothing is read outside values[r][0..row_bytes), scales[r] and zero_points[r], which are readable up to a multiple of
// kFactorPad units, and the tokens.
#pragma once

#include "kernels/types.h"

namespace hina {

constexpr int kMaxQRows = 32;     // rows of a block for pack
constexpr int kMaxFewRows = 128;  // and for few
constexpr int kUnit = 32;
constexpr int kShortUnit = 16;
constexpr int kFactorPad = 4;

// The value codes of E2M1: twice the value, plus 12.
#define HINA_MXFP4_CODES 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

// What will be read after a block, most likely, for `few` to ask for: a block of as many rows, and their scales and
// zero points. Nothing depends on it, nothing need be there.
struct QNext {
  const void* values = nullptr;
  const void* factors[2] = {};   // scales and zero points ..
  int64_t factor_bytes[2] = {};  // .. of all rows, as they lie in the model
};

// A block of rows of one matrix.
struct QRows {
  const void* const* values;        // [n] rows as they lie, at any address
  const float* const* scales;       // [n][units]
  const float* const* zero_points;  // [n][units]
  int n;                            // 0..kMaxQRows, for few ..kMaxFewRows
  int64_t row_bytes;                // readable bytes of a row: may end within the last unit, padding is not needed
  int unit;                         // 16 or 32
  QNext next = {};
};

struct QDotKernel {
  const char* name;
  Isa isa;
  WeightFormat format;
  int pack_from;
  int streams;

  // Bytes of a token of k values; a multiple of 64.
  int64_t (*token_bytes)(int64_t k, int unit);
  // Quantises values [from, to) of a token of k values; x points at the first of them, at any address. `from` is a
  // multiple of `unit`, and `to` is one too or is k, in which case the padding is written as well. Parts of one token
  // may be written by different threads.
  void (*quantise)(const float* x, int64_t from, int64_t to, int64_t k, int unit, void* token);

  // out[t * out_stride + r], tokens 64-byte aligned.
  void (*few)(const QRows& rows, const void* const* tokens, int n_tokens, int64_t k, float* out, int64_t out_stride);

  // Bytes of the panel of a block of up to kMaxQRows rows; a multiple of 64. Panels are 64-byte aligned.
  int64_t (*panel_bytes)(int64_t k, int unit);
  void (*pack)(const QRows& rows, int64_t k, void* panel);
  void (*many)(const void* panel, int n_rows, int unit, const void* const* tokens, int n_tokens, int64_t k, float* out,
               int64_t out_stride);
};

}  // namespace hina
