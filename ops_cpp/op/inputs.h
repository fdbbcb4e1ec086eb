// The inputs of one node: constant tensors of the model, and what the model declares of the others.
#pragma once

#include <string>
#include <vector>

#include "kernels/types.h"
#include "op/ort_api.h"

namespace hina {

// A constant tensor of the model, owned by the session. Its data has exactly the size that type and shape say.
struct Constant {
  std::string what;  // for messages: "gate_proj (tensor 'model.experts.gate')"
  const std::byte* data = nullptr;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<int64_t> shape;
};

class Inputs {
 public:
  Inputs(const OrtApi& api, const OrtKernelInfo* info);

  size_t count() const { return count_; }
  // The tensor's name; empty where the input is left out.
  std::string name(size_t index) const;
  bool has(size_t index) const { return !name(index).empty(); }
  // Throws Error if the input is left out or is no constant; `field` is what messages call it.
  Constant constant(size_t index, const std::string& field) const;
  TensorInfo declared(size_t index) const { return declared_info(api_, info_, index); }

 private:
  const OrtApi& api_;
  const OrtKernelInfo* info_;
  size_t count_ = 0;
};

// The float type of `type`, or Error naming `what`.
DataType float_type(ONNXTensorElementDataType type, const std::string& what);

// Bytes of an element; not for kUint4.
int64_t element_size(DataType type);

// `n` values of a float tensor, from element `first`, `step` apart. Throws Error if it has another type.
std::vector<float> float_values(const Constant& tensor, int64_t first, int64_t step, int64_t n);

}  // namespace hina
