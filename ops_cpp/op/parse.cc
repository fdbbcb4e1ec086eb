#include "op/parse.h"

#include <algorithm>
#include <limits>
#include <map>

#include "kernels/dispatch.h"
#include "op/attributes.h"
#include "op/schema.h"
#include "op/words.h"

namespace hina {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();

// A constant tensor of the model, owned by the session.
struct Constant {
  std::string what;  // for messages: "gate_proj (tensor 'model.experts.gate')"
  const std::byte* data = nullptr;
  DataType type = DataType::kFloat32;
  std::vector<int64_t> shape;

  int64_t element_size() const { return type == DataType::kFloat32 ? 4 : 2; }
};

class Parser {
 public:
  Parser(const OrtApi& api, const OrtKernelInfo* info) : api_(api), info_(info), attributes_(api, info) {
    check(api, api.KernelInfo_GetInputCount(info, &input_count_));
  }

  Node parse() {
    size_t size = 0;
    check(api_, api_.KernelInfo_GetNodeName(info_, nullptr, &size));
    node_.name.resize(size);
    check(api_, api_.KernelInfo_GetNodeName(info_, node_.name.data(), &size));
    node_.name.resize(size > 0 ? size - 1 : 0);
    try {
      read_attributes();
      read_weights();
      read_router();
      check_run_time_inputs();
    } catch (const Error& e) {
      throw Error("HinaMoE node '" + node_.name + "': " + e.what());
    }
    return std::move(node_);
  }

 private:
  Params& p() { return node_.params; }

  // --- attributes ---

  void read_attributes() {
    constexpr int64_t kMost = 65536;  // far above any model, and small enough for one Expert each in memory
    attributes_.integer("spec_version", kSpecVersion, kSpecVersion);
    p().num_experts = attributes_.integer("num_experts", 1, kMost);
    p().top_k = attributes_.integer("top_k", 1, p().num_experts);
    stacked_ = attributes_.flag("experts_stacked");
    up_first_ = attributes_.word("gate_up_order") == 1;
    interleaved_ = attributes_.flag("gate_up_interleaved");
    Router& r = p().router;
    r.score_func = static_cast<ScoreFunc>(attributes_.word("score_func"));
    r.n_group = attributes_.integer("n_group", 1, p().num_experts);
    r.topk_group = attributes_.integer("topk_group", 1, r.n_group);
    if (p().num_experts % r.n_group != 0)
      throw Error("attribute n_group is " + std::to_string(r.n_group) +
                  ", expected a divisor of num_experts = " + std::to_string(p().num_experts));
    const bool grouped_scores = r.score_func == ScoreFunc::kSoftmax || r.score_func == ScoreFunc::kSigmoid;
    if (r.n_group > 1 && !grouped_scores)
      throw Error("attribute n_group is " + std::to_string(r.n_group) + ", expected 1 with score_func " +
                  attributes_.text("score_func"));
    r.group_score = static_cast<GroupScore>(attributes_.word("group_score_func"));
    r.group_mask_value = attributes_.number("group_mask_value", -kInf, kMax);
    r.mix_from_selection = attributes_.word("mixing_source") == 1;
    r.norm_topk_prob = attributes_.flag("norm_topk_prob");
    r.norm_p = attributes_.number("norm_p", std::numeric_limits<float>::min(), kMax);
    r.norm_eps = attributes_.number("norm_eps", -kMax, kMax);
    r.norm_floor = attributes_.number("norm_floor", 0.0f, kMax);
    r.routed_scaling_factor = attributes_.number("routed_scaling_factor", -kMax, kMax);
    r.sparsemixer_jitter_eps = attributes_.number("sparsemixer_jitter_eps", 0.0f, kMax);
    if (r.score_func == ScoreFunc::kSparsemixer && p().top_k != 2)
      throw Error("attribute top_k is " + std::to_string(p().top_k) + ", expected 2 with score_func sparsemixer");
    r.ties_to_highest = attributes_.word("tie_break") == 1;
    r.zero_nonfinite = attributes_.word("nonfinite_router") == 1;
    p().weights_on_input = attributes_.word("apply_weights_to") == 1;
    p().activation = static_cast<Activation>(attributes_.word("activation"));
    p().activation_params = {attributes_.number("activation_alpha", -kMax, kMax),
                             attributes_.number("activation_beta", -kMax, kMax),
                             attributes_.number("activation_limit", 0.0f, kInf)};
  }

  // --- inputs ---

  std::string tensor_name(size_t index) const {
    if (index >= input_count_) return {};
    size_t size = 0;
    check(api_, api_.KernelInfo_GetInputName(info_, index, nullptr, &size));
    std::string name(size, '\0');
    check(api_, api_.KernelInfo_GetInputName(info_, index, name.data(), &size));
    name.resize(size > 0 ? size - 1 : 0);
    return name;
  }

  bool has(size_t index) const { return !tensor_name(index).empty(); }

  Constant constant(size_t index, const std::string& field) const {
    Constant c;
    const std::string name = tensor_name(index);
    c.what = field + (name.empty() ? "" : " (tensor '" + name + "')");
    if (name.empty()) throw Error(c.what + " is missing");
    int is_constant = 0;
    const OrtValue* value = nullptr;
    check(api_, api_.KernelInfoGetConstantInput_tensor(info_, index, &is_constant, &value));
    if (!is_constant || value == nullptr)
      throw Error(c.what + " is not a constant, expected an initializer of the model that is not a graph input too");
    const TensorInfo info = tensor_info(api_, value);
    c.type = float_type(info.type, c.what);
    c.shape = info.shape;
    c.data = static_cast<const std::byte*>(tensor_data(api_, value));
    return c;
  }

  void expect_shape(const Constant& c, const std::vector<int64_t>& shape) const {
    if (c.shape != shape)
      throw Error(c.what + " has shape " + shape_text(c.shape) + ", expected " + shape_text(shape) + " beside " +
                  sizes_from_);
  }

  static std::vector<float> values(const Constant& c, int64_t first, int64_t step, int64_t n) {
    std::vector<float> out(static_cast<size_t>(n));
    const KernelSet portable = select_kernels(Isa::kPortable);
    for (int64_t i = 0; i < n; ++i)
      portable.widen[static_cast<int>(c.type)](c.data + (first + i * step) * c.element_size(), &out[i], 1);
    return out;
  }

  // --- weights ---

  struct Field {
    const WeightField* schema;
    std::vector<Constant> tensors;  // one, or E
  };

  void read_weights() {
    const std::string names = attributes_.text("weight_inputs");
    size_t input = kFirstWeight;
    for (const std::string& name : split_words(names)) {
      const auto* schema = std::find_if(std::begin(kWeightFields), std::end(kWeightFields),
                                        [&](const WeightField& f) { return name == f.name; });
      if (schema == std::end(kWeightFields))
        throw Error("attribute weight_inputs names '" + name + "', which is no weight");
      if (fields_.count(name) > 0) throw Error("attribute weight_inputs names " + name + " twice");
      Field& field = fields_[name];
      field.schema = schema;
      const int64_t count = schema->shared || stacked_ ? 1 : p().num_experts;
      const int64_t left = static_cast<int64_t>(input_count_ - std::min(input, input_count_));
      if (left < count)
        throw Error("weight_inputs needs " + std::to_string(count) + " tensors for " + name + ", but only " +
                    std::to_string(left) + " inputs are left");
      for (int64_t i = 0; i < count; ++i)
        field.tensors.push_back(constant(input++, count > 1 ? name + " of expert " + std::to_string(i) : name));
    }
    if (input != input_count_)
      throw Error("the node has " + std::to_string(input_count_) + " inputs, expected " + std::to_string(input) +
                  " with weight_inputs '" + names + "'");
    p().gated = check_projections("");
    const bool shared =
        std::any_of(fields_.begin(), fields_.end(), [](const auto& f) { return f.second.schema->shared; });
    if (shared) p().shared_gated = check_projections("shared_");
    read_sizes(shared);
    check_shapes();
    p().experts.resize(static_cast<size_t>(p().num_experts));
    for (int64_t e = 0; e < p().num_experts; ++e) p().experts[e] = expert("", e, p().intermediate_size);
    for (const auto& [name, field] : fields_)
      for (const Constant& tensor : field.tensors) p().any_narrow_weight |= tensor.type != DataType::kFloat32;
    if (!shared) return;
    p().shared = expert("shared_", 0, p().shared_intermediate_size);
    if (const auto gate = fields_.find("shared_expert_gate"); gate != fields_.end())
      p().shared_gate = matrix(gate->second, 0, 0, 1, p().hidden_size);
  }

  bool has_field(const std::string& name) const { return fields_.count(name) > 0; }

  // Whether the projections with this prefix are gated; throws if they make no MLP.
  bool check_projections(const std::string& prefix) const {
    const bool gate = has_field(prefix + "gate_proj"), up = has_field(prefix + "up_proj");
    const bool both = has_field(prefix + "gate_up_proj");
    if (!has_field(prefix + "down_proj") || both == up || (both && gate))
      throw Error("attribute weight_inputs must name " + prefix + "down_proj and either " + prefix + "gate_up_proj, " +
                  prefix + "gate_proj with " + prefix + "up_proj, or " + prefix + "up_proj alone");
    for (const char* name : {"gate_proj", "up_proj", "gate_up_proj"})
      if (has_field(prefix + name + "_bias") && !has_field(prefix + name))
        throw Error("attribute weight_inputs names " + prefix + name + "_bias without " + prefix + name);
    return gate || both;
  }

  // H and I from down_proj [H, I], S from shared_down_proj [H, S]: every other shape must then agree.
  void read_sizes(bool shared) {
    const auto size_of = [&](const std::string& name, size_t axis_from_end) {
      const Constant& down = fields_.at(name).tensors[0];
      const size_t rank = name == "down_proj" && stacked_ ? 3 : 2;
      if (down.shape.size() != rank)
        throw Error(down.what + " has shape " + shape_text(down.shape) + ", expected " + std::to_string(rank) +
                    " axes");
      sizes_from_ += (sizes_from_.empty() ? "" : " and ") + name + " " + shape_text(down.shape);
      const int64_t size = down.shape[rank - axis_from_end];
      if (size < 1 || size > std::numeric_limits<int32_t>::max())
        throw Error(down.what + " has shape " + shape_text(down.shape) +
                    ", expected sizes of at least 1 and below 2^31");
      return size;
    };
    p().hidden_size = size_of("down_proj", 2);
    sizes_from_.clear();
    p().intermediate_size = size_of("down_proj", 1);
    if (shared) p().shared_intermediate_size = size_of("shared_down_proj", 1);
  }

  // Of a symbol as the schema's shapes spell it: "[2I," or "H]".
  int64_t size_of_symbol(const std::string& symbol) const {
    int64_t size = 1;
    for (const char c : symbol) {
      if (c == '2') size *= 2;
      if (c == 'H') size *= node_.params.hidden_size;
      if (c == 'I') size *= node_.params.intermediate_size;
      if (c == 'S') size *= node_.params.shared_intermediate_size;
    }
    return size;
  }

  void check_shapes() const {
    for (const auto& [name, field] : fields_) {
      std::vector<int64_t> shape;
      if (stacked_ && !field.schema->shared) shape.push_back(node_.params.num_experts);
      for (const std::string& symbol : split_words(field.schema->shape)) shape.push_back(size_of_symbol(symbol));
      for (const Constant& tensor : field.tensors) expect_shape(tensor, shape);
    }
  }

  // Rows first, first + step, .. of expert `e` in a field whose experts have `rows` rows of `cols` values.
  Matrix matrix(const Field& field, int64_t e, int64_t first, int64_t step, int64_t cols, int64_t rows = 0) const {
    const bool one_tensor = field.tensors.size() == 1;
    const Constant& c = field.tensors[one_tensor ? 0 : static_cast<size_t>(e)];
    const int64_t row_bytes = cols * c.element_size();
    return {c.data + ((one_tensor ? e * rows : 0) + first) * row_bytes, step * row_bytes, c.type};
  }

  std::vector<float> bias(const std::string& name, int64_t e, int64_t first, int64_t step, int64_t n,
                          int64_t size) const {
    const auto at = fields_.find(name);
    if (at == fields_.end()) return {};
    const bool one_tensor = at->second.tensors.size() == 1;
    return values(at->second.tensors[one_tensor ? 0 : static_cast<size_t>(e)], (one_tensor ? e * size : 0) + first,
                  step, n);
  }

  Expert expert(const std::string& prefix, int64_t e, int64_t size) const {
    const int64_t hidden = node_.params.hidden_size;
    Expert x;
    x.down = matrix(fields_.at(prefix + "down_proj"), e, 0, 1, size, hidden);
    x.down_bias = bias(prefix + "down_proj_bias", e, 0, 1, hidden, hidden);
    if (has_field(prefix + "gate_up_proj")) {
      const int64_t step = interleaved_ ? 2 : 1, second = interleaved_ ? 1 : size;
      const int64_t gate = up_first_ ? second : 0, up = up_first_ ? 0 : second;
      const Field& field = fields_.at(prefix + "gate_up_proj");
      const std::string bias_name = prefix + "gate_up_proj_bias";
      x.gate = matrix(field, e, gate, step, hidden, 2 * size);
      x.up = matrix(field, e, up, step, hidden, 2 * size);
      x.gate_bias = bias(bias_name, e, gate, step, size, 2 * size);
      x.up_bias = bias(bias_name, e, up, step, size, 2 * size);
      return x;
    }
    x.up = matrix(fields_.at(prefix + "up_proj"), e, 0, 1, hidden, size);
    x.up_bias = bias(prefix + "up_proj_bias", e, 0, 1, size, size);
    if (has_field(prefix + "gate_proj")) {
      x.gate = matrix(fields_.at(prefix + "gate_proj"), e, 0, 1, hidden, size);
      x.gate_bias = bias(prefix + "gate_proj_bias", e, 0, 1, size, size);
    }
    return x;
  }

  // --- router and run-time inputs ---

  void read_router() {
    const bool weight = has(kRouterWeight), logits = has(kRouterLogits), topk = has(kTopKIds);
    if (weight + logits + topk != 1)
      throw Error("expected exactly one of the inputs router_weight, router_logits and topk_ids, got " +
                  std::to_string(weight + logits + topk));
    if (topk != has(kTopKWeights))
      throw Error("the inputs topk_ids and topk_weights belong together, got one without the other");
    if (has(kRouterBias) && !weight) throw Error("the input router_bias needs router_weight");
    if (has(kCorrectionBias) && topk) throw Error("the input e_score_correction_bias has no meaning beside topk_ids");
    Router& r = p().router;
    r.input = weight ? RouterInput::kWeight : logits ? RouterInput::kLogits : RouterInput::kTopK;
    const int64_t experts = p().num_experts;
    if (weight) {
      const Constant c = constant(kRouterWeight, "router_weight");
      expect_shape(c, {experts, p().hidden_size});
      r.weight = {c.data, p().hidden_size * c.element_size(), c.type};
    }
    if (has(kRouterBias)) r.bias = vector_of_experts(kRouterBias, "router_bias");
    if (has(kCorrectionBias)) r.correction = vector_of_experts(kCorrectionBias, "e_score_correction_bias");
  }

  std::vector<float> vector_of_experts(size_t index, const char* name) {
    const Constant c = constant(index, name);
    expect_shape(c, {p().num_experts});
    return values(c, 0, 1, p().num_experts);
  }

  void check_run_time_inputs() const {
    const Params& params = node_.params;
    check_declared(kHiddenStates, params.hidden_size);
    if (params.router.input == RouterInput::kLogits) check_declared(kRouterLogits, params.num_experts);
    if (params.router.input != RouterInput::kTopK) return;
    check_declared(kTopKIds, params.top_k);
    check_declared(kTopKWeights, params.top_k);
  }

  void check_declared(size_t index, int64_t last) const {
    const InputSchema& schema = kInputs[index];
    const std::string name = tensor_name(index);
    if (name.empty()) throw Error(std::string("the input ") + schema.name + " is missing");
    const std::string what = std::string(schema.name) + " (tensor '" + name + "')";
    const TensorInfo declared = declared_info(api_, info_, index);
    if (!schema.indices) {
      float_type(declared.type, what);
    } else if (declared.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 &&
               declared.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32) {
      throw Error(what + " is " + type_name(declared.type) + ", expected int64 or int32");
    }
    if (declared.has_shape && declared.shape.back() >= 0 && declared.shape.back() != last)
      throw Error(what + " has shape " + shape_text(declared.shape) + ", expected a last axis of " +
                  std::to_string(last));
  }

  const OrtApi& api_;
  const OrtKernelInfo* info_;
  Attributes attributes_;
  size_t input_count_ = 0;
  Node node_;
  bool stacked_ = true, up_first_ = false, interleaved_ = false;
  std::map<std::string, Field> fields_;
  std::string sizes_from_;  // for messages: the tensors whose shapes say what H, I and S are
};

}  // namespace

DataType float_type(ONNXTensorElementDataType type, const std::string& what) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return DataType::kFloat32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return DataType::kFloat16;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return DataType::kBFloat16;
    default:
      throw Error(what + " is " + type_name(type) + ", expected float32, float16 or bfloat16");
  }
}

Node parse_node(const OrtApi& api, const OrtKernelInfo* info) { return Parser(api, info).parse(); }

}  // namespace hina
