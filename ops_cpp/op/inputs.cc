#include "op/inputs.h"

#include "kernels/dispatch.h"

namespace hina {

Inputs::Inputs(const OrtApi& api, const OrtKernelInfo* info) : api_(api), info_(info) {
  check(api, api.KernelInfo_GetInputCount(info, &count_));
}

std::string Inputs::name(size_t index) const {
  if (index >= count_) return {};
  size_t size = 0;
  check(api_, api_.KernelInfo_GetInputName(info_, index, nullptr, &size));
  std::string name(size, '\0');
  check(api_, api_.KernelInfo_GetInputName(info_, index, name.data(), &size));
  name.resize(size > 0 ? size - 1 : 0);
  return name;
}

Constant Inputs::constant(size_t index, const std::string& field) const {
  Constant c;
  const std::string tensor = name(index);
  c.what = field + (tensor.empty() ? "" : " (tensor '" + tensor + "')");
  if (tensor.empty()) throw Error(c.what + " is missing");
  int is_constant = 0;
  const OrtValue* value = nullptr;
  check(api_, api_.KernelInfoGetConstantInput_tensor(info_, index, &is_constant, &value));
  if (!is_constant || value == nullptr)
    throw Error(c.what + " is not a constant, expected an initializer of the model that is not a graph input too");
  const TensorInfo info = tensor_info(api_, value);
  c.type = info.type;
  c.shape = info.shape;
  // A string tensor, for one, has no data to point at; whoever wants another type than the tensor's says so.
  if (info.type != ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING)
    c.data = static_cast<const std::byte*>(tensor_data(api_, value));
  return c;
}

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

int64_t element_size(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return 4;
    case DataType::kFloat16:
    case DataType::kBFloat16:
      return 2;
    default:
      return 1;
  }
}

std::vector<float> float_values(const Constant& tensor, int64_t first, int64_t step, int64_t n) {
  const DataType type = float_type(tensor.type, tensor.what);
  const WidenFn widen = select_kernels(Isa::kPortable).widen[static_cast<int>(type)];
  std::vector<float> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) widen(tensor.data + (first + i * step) * element_size(type), &values[i], 1);
  return values;
}

}  // namespace hina
