#include "op/parse.h"

#include <limits>

#include "op/attributes.h"
#include "op/inputs.h"
#include "op/schema.h"
#include "op/weights.h"

namespace hina {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();

class Parser {
 public:
  Parser(const OrtApi& api, const OrtKernelInfo* info)
      : api_(api), info_(info), attributes_(api, info), inputs_(api, info) {}

  Node parse() {
    size_t size = 0;
    check(api_, api_.KernelInfo_GetNodeName(info_, nullptr, &size));
    node_.name.resize(size);
    check(api_, api_.KernelInfo_GetNodeName(info_, node_.name.data(), &size));
    node_.name.resize(size > 0 ? size - 1 : 0);
    try {
      read_attributes();
      sizes_from_ = read_weights(inputs_, attributes_, p());
      read_router();
      check_run_time_inputs();
    } catch (const Error& e) {
      throw Error("HinaMoE node '" + node_.name + "': " + e.what());
    }
    return std::move(node_);
  }

 private:
  Params& p() { return node_.params; }

  void read_attributes() {
    constexpr int64_t kMost = 65536;  // far above any model, and small enough for one Expert each in memory
    attributes_.integer("spec_version", kSpecVersion, kSpecVersion);
    p().num_experts = attributes_.integer("num_experts", 1, kMost);
    p().top_k = attributes_.integer("top_k", 1, p().num_experts);
    p().int8_activations = attributes_.integer("accuracy_level", 0, 4) == 4;
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

  void expect_shape(const Constant& c, const std::vector<int64_t>& shape) const {
    if (c.shape != shape)
      throw Error(c.what + " has shape " + shape_text(c.shape) + ", expected " + shape_text(shape) + " beside " +
                  sizes_from_);
  }

  void read_router() {
    const bool weight = inputs_.has(kRouterWeight), logits = inputs_.has(kRouterLogits), topk = inputs_.has(kTopKIds);
    if (weight + logits + topk != 1)
      throw Error("expected exactly one of the inputs router_weight, router_logits and topk_ids, got " +
                  std::to_string(weight + logits + topk));
    if (topk != inputs_.has(kTopKWeights))
      throw Error("the inputs topk_ids and topk_weights belong together, got one without the other");
    if (inputs_.has(kRouterBias) && !weight) throw Error("the input router_bias needs router_weight");
    if (inputs_.has(kCorrectionBias) && topk)
      throw Error("the input e_score_correction_bias has no meaning beside topk_ids");
    Router& r = p().router;
    r.input = weight ? RouterInput::kWeight : logits ? RouterInput::kLogits : RouterInput::kTopK;
    const int64_t experts = p().num_experts;
    if (weight) {
      const Constant c = inputs_.constant(kRouterWeight, "router_weight");
      expect_shape(c, {experts, p().hidden_size});
      r.weight.data = c.data;
      r.weight.type = float_type(c.type, c.what);
      r.weight.row_stride = p().hidden_size * element_size(r.weight.type);
    }
    if (inputs_.has(kRouterBias)) r.bias = vector_of_experts(kRouterBias, "router_bias");
    if (inputs_.has(kCorrectionBias)) r.correction = vector_of_experts(kCorrectionBias, "e_score_correction_bias");
  }

  std::vector<float> vector_of_experts(size_t index, const char* name) {
    const Constant c = inputs_.constant(index, name);
    expect_shape(c, {p().num_experts});
    return float_values(c, 0, 1, p().num_experts);
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
    const std::string name = inputs_.name(index);
    if (name.empty()) throw Error(std::string("the input ") + schema.name + " is missing");
    const std::string what = std::string(schema.name) + " (tensor '" + name + "')";
    const TensorInfo declared = inputs_.declared(index);
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
  Inputs inputs_;
  Node node_;
  std::string sizes_from_;  // for messages: the tensors whose shapes say what H, I and S are
};

}  // namespace

Node parse_node(const OrtApi& api, const OrtKernelInfo* info) { return Parser(api, info).parse(); }

}  // namespace hina
