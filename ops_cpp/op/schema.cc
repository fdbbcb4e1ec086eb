#include "op/schema.h"

#include <cstring>
#include <limits>

#include "op/json.h"
#include "op/words.h"

namespace hina {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr AttributeType kInt = AttributeType::kInt, kFloat = AttributeType::kFloat, kString = AttributeType::kString;

}  // namespace

const InputSchema kInputs[kFixedInputs] = {
    {"hidden_states", false, "[..., H]", true, false},
    {"router_weight", false, "[E, H]", false, true},
    {"router_bias", false, "[E]", false, true},
    {"router_logits", false, "[..., E]", false, false},
    {"topk_ids", true, "[..., k]", false, false},
    {"topk_weights", false, "[..., k]", false, false},
    {"e_score_correction_bias", false, "[E]", false, true},
};

const AttributeSchema kAttributes[kAttributeCount] = {
    {"spec_version", kInt, true, 0, "", ""},
    {"num_experts", kInt, true, 0, "", ""},
    {"top_k", kInt, true, 0, "", ""},
    {"weight_inputs", kString, true, 0, "", ""},
    {"weight_formats", kString, false, 0, "", ""},
    {"accuracy_level", kInt, false, 0, "", ""},
    {"experts_stacked", kInt, false, 1, "", ""},
    {"gate_up_order", kString, false, 0, "gate_up", "gate_up up_gate"},
    {"gate_up_interleaved", kInt, false, 0, "", ""},
    {"score_func", kString, false, 0, "softmax", "softmax sigmoid softmax_topk sigmoid_topk sparsemixer"},
    {"n_group", kInt, false, 1, "", ""},
    {"topk_group", kInt, false, 1, "", ""},
    {"group_score_func", kString, false, 0, "max", "max top2_sum"},
    {"group_mask_value", kFloat, false, -kInf, "", ""},
    {"mixing_source", kString, false, 0, "scores", "scores selection"},
    {"norm_topk_prob", kInt, false, 0, "", ""},
    {"norm_p", kFloat, false, 1, "", ""},
    {"norm_eps", kFloat, false, 0, "", ""},
    {"norm_floor", kFloat, false, 0, "", ""},
    {"routed_scaling_factor", kFloat, false, 1, "", ""},
    {"sparsemixer_jitter_eps", kFloat, false, 0.01, "", ""},
    {"tie_break", kString, false, 0, "lowest", "lowest highest"},
    {"nonfinite_router", kString, false, 0, "propagate", "propagate zero"},
    {"apply_weights_to", kString, false, 0, "output", "output input"},
    {"activation", kString, false, 0, "silu", "silu gelu gelu_tanh relu relu2 identity"},
    {"activation_alpha", kFloat, false, 1, "", ""},
    {"activation_beta", kFloat, false, 0, "", ""},
    {"activation_limit", kFloat, false, kInf, "", ""},
};

// A projection, and what it has beside it when it is quantised.
#define HINA_PROJECTION(name, rows, columns, shared)                                                            \
  {name, "[" rows ", " columns "]", shared}, {name "_scales", "[" rows ", ceil(" columns "/block)]", shared}, { \
    name "_zero_points", "[" rows ", ceil(" columns "/block)]", shared                                          \
  }

const WeightField kWeightFields[kWeightFieldCount] = {
    HINA_PROJECTION("gate_proj", "I", "H", false),
    HINA_PROJECTION("up_proj", "I", "H", false),
    HINA_PROJECTION("gate_up_proj", "2I", "H", false),
    HINA_PROJECTION("down_proj", "H", "I", false),
    {"gate_proj_bias", "[I]", false},
    {"up_proj_bias", "[I]", false},
    {"gate_up_proj_bias", "[2I]", false},
    {"down_proj_bias", "[H]", false},
    HINA_PROJECTION("shared_gate_proj", "S", "H", true),
    HINA_PROJECTION("shared_up_proj", "S", "H", true),
    HINA_PROJECTION("shared_gate_up_proj", "2S", "H", true),
    HINA_PROJECTION("shared_down_proj", "H", "S", true),
    {"shared_gate_proj_bias", "[S]", true},
    {"shared_up_proj_bias", "[S]", true},
    {"shared_gate_up_proj_bias", "[2S]", true},
    {"shared_down_proj_bias", "[H]", true},
    {"shared_expert_gate", "[1, H]", true},
};

const AttributeSchema& attribute_schema(const char* name) {
  for (const AttributeSchema& attribute : kAttributes)
    if (std::strcmp(attribute.name, name) == 0) return attribute;
  __builtin_unreachable();  // names come from this library's own code
}

std::string schema_json() {
  std::string out = "{\"domain\":" + json_string(kDomain) + ",\"op_type\":" + json_string(kOpType) +
                    ",\"opset_version\":" + std::to_string(kOpsetVersion) +
                    ",\"spec_version\":" + std::to_string(kSpecVersion) + ",\"inputs\":[";
  const char* comma = "";
  for (const InputSchema& input : kInputs) {
    out += std::string(comma) + "{\"name\":" + json_string(input.name) +
           ",\"types\":" + json_strings(split_words(input.indices ? "int64 int32" : "float32 float16 bfloat16")) +
           ",\"shape\":" + json_string(input.shape) + ",\"required\":" + (input.required ? "true" : "false") +
           ",\"constant\":" + (input.constant ? "true" : "false") + "}";
    comma = ",";
  }
  out += "],\"attributes\":[";
  comma = "";
  for (const AttributeSchema& attribute : kAttributes) {
    const bool text = attribute.type == AttributeType::kString;
    const char* type = text ? "string" : attribute.type == AttributeType::kInt ? "int" : "float";
    const std::string value = attribute.required ? "null"
                              : text             ? json_string(attribute.text)
                                                 : json_number(attribute.number);
    out += std::string(comma) + "{\"name\":" + json_string(attribute.name) + ",\"type\":" + json_string(type) +
           ",\"default\":" + value + ",\"values\":" + json_strings(split_words(attribute.values)) + "}";
    comma = ",";
  }
  out += "],\"weight_fields\":[";
  comma = "";
  for (const WeightField& field : kWeightFields) {
    out += std::string(comma) + "{\"name\":" + json_string(field.name) + ",\"shape\":" + json_string(field.shape) +
           ",\"shared\":" + (field.shared ? "true" : "false") + "}";
    comma = ",";
  }
  return out + "],\"outputs\":[\"output\",\"tokens_per_expert\"]}";
}

}  // namespace hina
