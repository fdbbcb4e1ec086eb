#include "op/weights.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

#include "op/formats.h"
#include "op/schema.h"
#include "op/words.h"

namespace hina {
namespace {

using Shape = std::vector<int64_t>;

struct Field {
  const WeightField* schema;
  std::vector<Constant> tensors;  // one, or E
};

// Rows first, first + step, .. of a matrix.
struct Slice {
  int64_t first = 0;
  int64_t step = 1;
};

// A size symbol of the schema's shapes: "[2I," or "H]".
int64_t size_of_symbol(const std::string& symbol, const Params& p) {
  int64_t size = 1;
  for (const char c : symbol) {
    if (c == '2') size *= 2;
    if (c == 'H') size *= p.hidden_size;
    if (c == 'I') size *= p.intermediate_size;
    if (c == 'S') size *= p.shared_intermediate_size;
  }
  return size;
}

// `name` without `suffix`, where it ends so.
std::optional<std::string> without(const std::string& name, std::string_view suffix) {
  if (!name.ends_with(suffix)) return std::nullopt;
  return name.substr(0, name.size() - suffix.size());
}

bool is_float(ONNXTensorElementDataType type) {
  return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ||
         type == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
}

[[noreturn]] void wrong_type(const Constant& tensor, const std::string& expected) {
  throw Error(tensor.what + " is " + type_name(tensor.type) + ", expected " + expected);
}

class Weights {
 public:
  Weights(const Inputs& inputs, const Attributes& attributes, Params& params)
      : inputs_(inputs),
        stacked_(attributes.flag("experts_stacked")),
        up_first_(attributes.word("gate_up_order") == 1),
        interleaved_(attributes.flag("gate_up_interleaved")),
        names_(attributes.text("weight_inputs")),
        formats_(parse_formats(attributes.text("weight_formats"))),
        p_(params) {}

  std::string read() {
    read_fields();
    p_.gated = check_projections("");
    const bool shared =
        std::any_of(fields_.begin(), fields_.end(), [](const auto& f) { return f.second.schema->shared; });
    if (shared) p_.shared_gated = check_projections("shared_");
    check_formats();
    for (const auto& [name, field] : fields_)
      for (const Constant& tensor : field.tensors) check_type(name, field, tensor);
    read_sizes(shared);
    for (const auto& [name, field] : fields_)
      for (const Constant& tensor : field.tensors) check_shape(name, field, tensor);
    p_.experts.resize(static_cast<size_t>(p_.num_experts));
    for (int64_t e = 0; e < p_.num_experts; ++e) p_.experts[e] = expert("", e, p_.intermediate_size);
    if (shared) p_.shared = expert("shared_", 0, p_.shared_intermediate_size);
    if (has("shared_expert_gate")) p_.shared_gate = matrix("shared_expert_gate", 0, {}, 1, p_.hidden_size);
    return sizes_from_;
  }

 private:
  bool has(const std::string& name) const { return fields_.count(name) > 0; }

  const QuantisedFormat* format_of(const std::string& projection) const {
    const auto at = formats_.find(projection);
    return at == formats_.end() ? nullptr : &at->second;
  }

  // --- which fields there are ---

  void read_fields() {
    size_t input = kFirstWeight;
    for (const std::string& name : split_words(names_)) {
      const auto* schema = std::find_if(std::begin(kWeightFields), std::end(kWeightFields),
                                        [&](const WeightField& f) { return name == f.name; });
      if (schema == std::end(kWeightFields))
        throw Error("attribute weight_inputs names '" + name + "', which is no weight");
      if (has(name)) throw Error("attribute weight_inputs names " + name + " twice");
      Field& field = fields_[name];
      field.schema = schema;
      const int64_t count = schema->shared || stacked_ ? 1 : p_.num_experts;
      const int64_t left = static_cast<int64_t>(inputs_.count() - std::min(input, inputs_.count()));
      if (left < count)
        throw Error("weight_inputs needs " + std::to_string(count) + " tensors for " + name + ", but only " +
                    std::to_string(left) + " inputs are left");
      for (int64_t i = 0; i < count; ++i)
        field.tensors.push_back(inputs_.constant(input++, count > 1 ? name + " of expert " + std::to_string(i) : name));
    }
    if (input != inputs_.count())
      throw Error("the node has " + std::to_string(inputs_.count()) + " inputs, expected " + std::to_string(input) +
                  " with weight_inputs '" + names_ + "'");
  }

  // Whether the projections with this prefix are gated; throws if they make no MLP.
  bool check_projections(const std::string& prefix) const {
    const bool gate = has(prefix + "gate_proj"), up = has(prefix + "up_proj"), both = has(prefix + "gate_up_proj");
    if (!has(prefix + "down_proj") || both == up || (both && gate))
      throw Error("attribute weight_inputs must name " + prefix + "down_proj and either " + prefix + "gate_up_proj, " +
                  prefix + "gate_proj with " + prefix + "up_proj, or " + prefix + "up_proj alone");
    for (const char* name : {"gate_proj", "up_proj", "gate_up_proj"})
      if (has(prefix + name + "_bias") && !has(prefix + name))
        throw Error("attribute weight_inputs names " + prefix + name + "_bias without " + prefix + name);
    return gate || both;
  }

  void check_formats() const {
    for (const auto& [name, format] : formats_) {
      if (!has(name)) throw Error("attribute weight_formats names " + name + ", which weight_inputs does not name");
      if (!has(name + std::string(kScalesSuffix)))
        throw Error("attribute weight_inputs names no " + name + std::string(kScalesSuffix) +
                    ", expected with weight_formats '" + name + "=" + format.word + "'");
      if (format.format == WeightFormat::kMxfp4 && has(name + std::string(kZeroPointsSuffix)))
        throw Error("attribute weight_inputs names " + name + std::string(kZeroPointsSuffix) +
                    ", but mxfp4 has no zero points");
    }
    for (const auto& [name, field] : fields_)
      for (const std::string_view suffix : {kScalesSuffix, kZeroPointsSuffix})
        if (const auto projection = without(name, suffix); projection && format_of(*projection) == nullptr)
          throw Error("attribute weight_inputs names " + name + ", but weight_formats has no format for " +
                      *projection);
  }

  // --- types and shapes ---

  // The tensors of a projection may be of other types in each expert; those of one expert must fit one another.
  void check_type(const std::string& name, const Field& field, const Constant& tensor) const {
    constexpr auto kUint8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, kInt8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    if (const QuantisedFormat* format = format_of(name)) {
      const bool any_int8 = format->format == WeightFormat::kUint8;
      if (tensor.type != kUint8 && !(any_int8 && tensor.type == kInt8))
        wrong_type(tensor,
                   std::string(any_int8 ? "uint8 or int8" : "uint8") + " as weight_formats says " + format->word);
    } else if (const auto scaled = without(name, kScalesSuffix)) {
      if (formats_.at(*scaled).format != WeightFormat::kMxfp4)
        float_type(tensor.type, tensor.what);
      else if (tensor.type != kUint8)
        wrong_type(tensor, "uint8 as weight_formats says mxfp4");
    } else if (const auto shifted = without(name, kZeroPointsSuffix)) {
      const Constant& codes = fields_.at(*shifted).tensors[static_cast<size_t>(&tensor - field.tensors.data())];
      if (formats_.at(*shifted).format == WeightFormat::kUint8) {
        if (tensor.type != codes.type) wrong_type(tensor, type_name(codes.type) + " as " + codes.what);
      } else if (tensor.type != kUint8 && !is_float(tensor.type)) {
        wrong_type(tensor, "uint8 (two to a byte), float32, float16 or bfloat16");
      }
    } else if (!is_float(tensor.type)) {
      wrong_type(tensor, "float32, float16 or bfloat16" +
                             (can_be_quantised(name) ? " as weight_formats has no word for " + name : ""));
    }
  }

  int64_t axis_of_rows(const Field& field) const { return stacked_ && !field.schema->shared ? 1 : 0; }

  // H, I and S from the rows of down, up or gate_up, and shared up or gate_up: every other shape must then agree.
  void read_sizes(bool shared) {
    const auto rows_of = [&](const std::string& name) {
      const Field& field = fields_.at(name);
      const Constant& tensor = field.tensors[0];
      const size_t rank = static_cast<size_t>(axis_of_rows(field)) + 2;
      const bool blocked = format_of(name) != nullptr && tensor.shape.size() == rank + 1;
      if (tensor.shape.size() != rank && !blocked)
        throw Error(tensor.what + " has shape " + shape_text(tensor.shape) + ", expected " + std::to_string(rank) +
                    (format_of(name) == nullptr ? "" : " or " + std::to_string(rank + 1)) + " axes");
      const int64_t rows = tensor.shape[rank - 2];
      if (rows < 1 || rows > std::numeric_limits<int32_t>::max())
        throw Error(tensor.what + " has shape " + shape_text(tensor.shape) +
                    ", expected sizes of at least 1 and below 2^31");
      sizes_from_ += (sizes_from_.empty() ? "" : " and ") + name + " " + shape_text(tensor.shape);
      return rows;
    };
    const auto intermediate = [&](const std::string& prefix) {
      if (!has(prefix + "gate_up_proj")) return rows_of(prefix + "up_proj");
      const int64_t rows = rows_of(prefix + "gate_up_proj");
      const Constant& tensor = fields_.at(prefix + "gate_up_proj").tensors[0];
      if (rows % 2 != 0)
        throw Error(tensor.what + " has shape " + shape_text(tensor.shape) + ", expected an even number of rows");
      return rows / 2;
    };
    p_.hidden_size = rows_of("down_proj");
    p_.intermediate_size = intermediate("");
    if (shared) p_.shared_intermediate_size = intermediate("shared_");
  }

  // The shapes that the tensor of one expert may have.
  std::vector<Shape> shapes_of(const std::string& name, const Field& field, const Constant& tensor) const {
    const auto plain = [&](const WeightField& schema) {
      Shape shape;
      for (const std::string& symbol : split_words(schema.shape)) shape.push_back(size_of_symbol(symbol, p_));
      return shape;
    };
    const auto scaled = without(name, kScalesSuffix), shifted = without(name, kZeroPointsSuffix);
    const std::string projection = scaled ? *scaled : shifted ? *shifted : name;
    const QuantisedFormat* format = format_of(projection);
    if (format == nullptr) return {plain(*field.schema)};
    const Shape matrix = plain(*fields_.at(projection).schema);
    const int64_t n = matrix[0], blocks = format->blocks(matrix[1]);
    if (projection == name) return {{n, format->row_bytes(matrix[1])}, {n, blocks, format->block_bytes(matrix[1])}};
    const bool packed = shifted && format->format == WeightFormat::kInt4 && !is_float(tensor.type);
    const int64_t values = packed ? (blocks + 1) / 2 : blocks;
    return {{n, values}, {n * values}};
  }

  void check_shape(const std::string& name, const Field& field, const Constant& tensor) const {
    std::string expected;
    for (Shape shape : shapes_of(name, field, tensor)) {
      if (axis_of_rows(field) > 0) shape.insert(shape.begin(), p_.num_experts);
      if (shape == tensor.shape) return;
      expected += (expected.empty() ? "" : " or ") + shape_text(shape);
    }
    const QuantisedFormat* format = format_of(name);
    throw Error(tensor.what + " has shape " + shape_text(tensor.shape) + ", expected " + expected +
                (format == nullptr ? "" : " for " + format->word) + " beside " + sizes_from_);
  }

  // --- where the rows lie ---

  struct View {
    const std::byte* data;
    int64_t stride;
  };

  // The tensor of expert `e`, and its element 0 when each expert has `size` elements.
  std::pair<const Constant&, int64_t> place(const Field& field, int64_t e, int64_t size) const {
    const bool one_tensor = field.tensors.size() == 1;
    return {field.tensors[one_tensor ? 0 : static_cast<size_t>(e)], one_tensor ? e * size : 0};
  }

  // A slice of the `rows` rows, of `row_bytes` each, of expert `e`.
  View view(const Field& field, int64_t e, Slice slice, int64_t rows, int64_t row_bytes) const {
    const auto [tensor, first] = place(field, e, rows);
    return {tensor.data + (first + slice.first) * row_bytes, slice.step * row_bytes};
  }

  Matrix matrix(const std::string& name, int64_t e, Slice slice, int64_t rows, int64_t cols) const {
    const Field& field = fields_.at(name);
    const Constant& tensor = place(field, e, rows).first;
    const auto lay = [&](const Field& f, int64_t row_bytes, const std::byte*& data, int64_t& stride) {
      const View v = view(f, e, slice, rows, row_bytes);
      data = v.data, stride = v.stride;
    };
    Matrix m;
    const QuantisedFormat* format = format_of(name);
    if (format == nullptr) {
      m.type = float_type(tensor.type, tensor.what);
      lay(field, cols * element_size(m.type), m.data, m.row_stride);
      return m;
    }
    m.format = tensor.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 ? WeightFormat::kInt8 : format->format;
    m.row_bytes = format->row_bytes(cols);
    m.block = format->block;
    lay(field, m.row_bytes, m.data, m.row_stride);

    const int64_t blocks = format->blocks(cols);
    const Field& scales = fields_.at(name + std::string(kScalesSuffix));
    const Constant& scale = place(scales, e, rows).first;
    m.scale_type = m.format == WeightFormat::kMxfp4 ? DataType::kE8M0 : float_type(scale.type, scale.what);
    lay(scales, blocks * element_size(m.scale_type), m.scales, m.scale_stride);

    const auto zero_points = fields_.find(name + std::string(kZeroPointsSuffix));
    if (zero_points == fields_.end()) return m;
    const Constant& zero_point = place(zero_points->second, e, rows).first;
    m.zero_point_type = is_float(zero_point.type)         ? float_type(zero_point.type, zero_point.what)
                        : m.format == WeightFormat::kInt4 ? DataType::kUint4
                        : m.format == WeightFormat::kInt8 ? DataType::kInt8
                                                          : DataType::kUint8;
    const bool packed = m.zero_point_type == DataType::kUint4;
    lay(zero_points->second, packed ? (blocks + 1) / 2 : blocks * element_size(m.zero_point_type), m.zero_points,
        m.zero_point_stride);
    return m;
  }

  std::vector<float> bias(const std::string& name, int64_t e, Slice slice, int64_t n, int64_t size) const {
    if (!has(name)) return {};
    const auto [tensor, first] = place(fields_.at(name), e, size);
    return float_values(tensor, first + slice.first, slice.step, n);
  }

  Expert expert(const std::string& prefix, int64_t e, int64_t size) const {
    const int64_t hidden = p_.hidden_size;
    Expert x;
    x.down = matrix(prefix + "down_proj", e, {}, hidden, size);
    x.down_bias = bias(prefix + "down_proj_bias", e, {}, hidden, hidden);
    if (has(prefix + "gate_up_proj")) {
      const Slice one{0, interleaved_ ? 2 : 1}, other{interleaved_ ? 1 : size, one.step};
      const Slice gate = up_first_ ? other : one, up = up_first_ ? one : other;
      x.gate = matrix(prefix + "gate_up_proj", e, gate, 2 * size, hidden);
      x.up = matrix(prefix + "gate_up_proj", e, up, 2 * size, hidden);
      if (interleaved_) x.gate_up = matrix(prefix + "gate_up_proj", e, {0, 1}, 2 * size, hidden);
      x.gate_bias = bias(prefix + "gate_up_proj_bias", e, gate, size, 2 * size);
      x.up_bias = bias(prefix + "gate_up_proj_bias", e, up, size, 2 * size);
      return x;
    }
    x.up = matrix(prefix + "up_proj", e, {}, size, hidden);
    x.up_bias = bias(prefix + "up_proj_bias", e, {}, size, size);
    if (has(prefix + "gate_proj")) {
      x.gate = matrix(prefix + "gate_proj", e, {}, size, hidden);
      x.gate_bias = bias(prefix + "gate_proj_bias", e, {}, size, size);
    }
    return x;
  }

  const Inputs& inputs_;
  const bool stacked_, up_first_, interleaved_;
  const std::string names_;
  const std::map<std::string, QuantisedFormat> formats_;
  Params& p_;
  std::map<std::string, Field> fields_;
  std::string sizes_from_;
};

}  // namespace

std::string read_weights(const Inputs& inputs, const Attributes& attributes, Params& params) {
  return Weights(inputs, attributes, params).read();
}

}  // namespace hina
