// The attribute weight_formats: which projections are quantised, and how their tensors lie.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "kernels/types.h"

namespace hina {

constexpr std::string_view kScalesSuffix = "_scales";
constexpr std::string_view kZeroPointsSuffix = "_zero_points";

// One word of weight_formats, "down_proj=int4:32", without its field.
struct QuantisedFormat {
  std::string word;     // "int4:32"
  WeightFormat format;  // kUint8 for int8: the tensor's type says which of the two it is
  int bits;
  int64_t block;  // 0: one scale for each row

  // Of a row of `k` values: how many scales, and the bytes of a block and of the row. A last block is padded.
  int64_t blocks(int64_t k) const { return block == 0 ? 1 : (k + block - 1) / block; }
  int64_t block_bytes(int64_t k) const { return ((block == 0 ? k : block) * bits + 7) / 8; }
  int64_t row_bytes(int64_t k) const { return blocks(k) * block_bytes(k); }
};

// Whether the field is a projection: whether the schema has scales of it. Biases have none.
bool can_be_quantised(const std::string& field);

// By field. Throws Error for a word that says no format, a field that cannot be quantised and a field named twice.
std::map<std::string, QuantisedFormat> parse_formats(const std::string& weight_formats);

// What weight_formats calls a format.
std::string format_word(WeightFormat format, int64_t block);

}  // namespace hina
