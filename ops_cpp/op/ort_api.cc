#include "op/ort_api.h"

#include <memory>

namespace hina {
namespace {

TensorInfo read(const OrtApi& api, const OrtTensorTypeAndShapeInfo* info) {
  TensorInfo result;
  check(api, api.GetTensorElementType(info, &result.type));
  size_t rank = 0;
  check(api, api.GetDimensionsCount(info, &rank));
  result.shape.resize(rank);
  check(api, api.GetDimensions(info, result.shape.data(), rank));
  return result;
}

}  // namespace

void check(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw Error(message);
}

TensorInfo tensor_info(const OrtApi& api, const OrtValue* value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api, api.GetTensorTypeAndShape(value, &info));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(api.ReleaseTensorTypeAndShapeInfo)> owned(
      info, api.ReleaseTensorTypeAndShapeInfo);
  TensorInfo result = read(api, info);
  result.has_shape = true;
  return result;
}

TensorInfo declared_info(const OrtApi& api, const OrtKernelInfo* info, size_t input) {
  OrtTypeInfo* type = nullptr;
  check(api, api.KernelInfo_GetInputTypeInfo(info, input, &type));
  const std::unique_ptr<OrtTypeInfo, decltype(api.ReleaseTypeInfo)> owned(type, api.ReleaseTypeInfo);
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  check(api, api.CastTypeInfoToTensorInfo(type, &tensor));
  if (tensor == nullptr) return {};
  TensorInfo result = read(api, tensor);
  result.has_shape = !result.shape.empty();  // no shape and a scalar cannot be told apart here
  return result;
}

const void* tensor_data(const OrtApi& api, const OrtValue* value) {
  void* data = nullptr;
  check(api, api.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  return data;
}

std::string type_name(ONNXTensorElementDataType type) {
  constexpr const char* kNames[] = {"undefined",      "float32",  "uint8",        "int8",           "uint16",
                                    "int16",          "int32",    "int64",        "string",         "bool",
                                    "float16",        "float64",  "uint32",       "uint64",         "complex64",
                                    "complex128",     "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2",
                                    "float8e5m2fnuz", "uint4",    "int4",         "float4e2m1"};
  if (static_cast<size_t>(type) < sizeof kNames / sizeof *kNames) return kNames[type];
  return "element type " + std::to_string(static_cast<int>(type));
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    out += (i > 0 ? ", " : "") + (shape[i] < 0 ? std::string("?") : std::to_string(shape[i]));
  return out + "]";
}

}  // namespace hina
