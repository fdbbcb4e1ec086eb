#include "op/formats.h"

#include <algorithm>
#include <iterator>

#include "op/ort_api.h"
#include "op/schema.h"
#include "op/words.h"

namespace hina {
namespace {

constexpr int64_t kMxfp4Block = 32;

QuantisedFormat parse_format(const std::string& word, const std::string& text) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const bool has_block = colon != std::string::npos;
  QuantisedFormat format{text, WeightFormat::kUint8, 8, 0};
  bool known = name == "int8" || name == "int4" || (name == "mxfp4" && !has_block);
  if (name != "int8") format.bits = 4, format.format = WeightFormat::kInt4;
  if (name == "mxfp4") format.block = kMxfp4Block, format.format = WeightFormat::kMxfp4;
  if (has_block) {
    const std::string block = text.substr(colon + 1);
    for (const int64_t size : {16, 32, 64, 128, 256})
      if (block == std::to_string(size)) format.block = size;
    known &= format.block > 0;
  }
  if (!known)
    throw Error("attribute weight_formats says '" + word +
                "', expected field=format or field=format:block with a format of int8, int4 or mxfp4 (no block), "
                "and a block of 16, 32, 64, 128 or 256");
  return format;
}

}  // namespace

bool can_be_quantised(const std::string& field) {
  const std::string scales = field + std::string(kScalesSuffix);
  return std::any_of(std::begin(kWeightFields), std::end(kWeightFields),
                     [&](const WeightField& f) { return scales == f.name; });
}

std::map<std::string, QuantisedFormat> parse_formats(const std::string& weight_formats) {
  std::map<std::string, QuantisedFormat> formats;
  for (const std::string& word : split_words(weight_formats)) {
    const size_t equals = std::min(word.find('='), word.size());
    const std::string field = word.substr(0, equals);
    const QuantisedFormat format = parse_format(word, word.substr(std::min(equals + 1, word.size())));
    if (!can_be_quantised(field))
      throw Error("attribute weight_formats names '" + field + "', expected a projection, as gate_proj is");
    if (!formats.emplace(field, format).second) throw Error("attribute weight_formats names " + field + " twice");
  }
  return formats;
}

std::string format_word(WeightFormat format, int64_t block) {
  if (format == WeightFormat::kMxfp4) return "mxfp4";
  const std::string name = format == WeightFormat::kInt4 ? "int4" : "int8";
  return block == 0 ? name : name + ":" + std::to_string(block);
}

}  // namespace hina
