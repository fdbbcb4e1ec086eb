// HinaMoE inputs and attributes, as graph_passes/op_schema.py has them; a test compares the two.
#pragma once

#include <string>

namespace hina {

constexpr const char* kDomain = "hina";
constexpr const char* kOpType = "HinaMoE";
constexpr int kOpsetVersion = 1;
constexpr int kSpecVersion = 1;

enum InputIndex {
  kHiddenStates = 0,
  kRouterWeight,
  kRouterBias,
  kRouterLogits,
  kTopKIds,
  kTopKWeights,
  kCorrectionBias,
  kFirstWeight,  // the variadic list starts here
};
constexpr int kFixedInputs = kFirstWeight;

struct InputSchema {
  const char* name;
  bool indices;  // int64 or int32; else a float type
  const char* shape;
  bool required;
  bool constant;
};

enum class AttributeType { kInt, kFloat, kString };

struct AttributeSchema {
  const char* name;
  AttributeType type;
  bool required;
  double number;       // default of a number
  const char* text;    // default of a string
  const char* values;  // what a string may say, separated by spaces; empty: anything
};

struct WeightField {
  const char* name;
  const char* shape;  // of one expert
  bool shared;
};

extern const InputSchema kInputs[kFixedInputs];
constexpr int kAttributeCount = 28;
extern const AttributeSchema kAttributes[kAttributeCount];
constexpr int kWeightFieldCount = 33;
extern const WeightField kWeightFields[kWeightFieldCount];

const AttributeSchema& attribute_schema(const char* name);

// The whole schema as JSON.
std::string schema_json();

}  // namespace hina
