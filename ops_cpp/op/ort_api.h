// The little of ONNX Runtime's C API that this library needs, with statuses turned into exceptions. Exceptions live
// inside op/ only: every callback catches them and hands a status back (see guarded).
#pragma once

#include <onnxruntime_c_api.h>

#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace hina {

// The lowest API version that this library works with: shape inference and parallel-for of custom ops came with 17
// (ONNX Runtime 1.17), and that release still refuses activations and router inputs of different types. Asking for no
// more is what lets one binary work with every later release.
constexpr uint32_t kMinimumOrtApi = 18;
static_assert(ORT_API_VERSION >= kMinimumOrtApi, "the ONNX Runtime headers are older than 1.18");

// A fault of the model or of the inputs; the text goes to the user as it is.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws what a failed status says, and releases it.
void check(const OrtApi& api, OrtStatus* status);

struct TensorInfo {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<int64_t> shape;  // -1: symbolic
  bool has_shape = false;
};

// Of a run-time value, and of an input as the model declares it.
TensorInfo tensor_info(const OrtApi& api, const OrtValue* value);
TensorInfo declared_info(const OrtApi& api, const OrtKernelInfo* info, size_t input);

const void* tensor_data(const OrtApi& api, const OrtValue* value);

std::string type_name(ONNXTensorElementDataType type);
std::string shape_text(const std::vector<int64_t>& shape);

// Runs `body`; whatever it throws becomes a status with `code`.
template <typename Body>
OrtStatus* guarded(const OrtApi& api, OrtErrorCode code, Body body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return api.CreateStatus(ORT_FAIL, "HinaMoE: out of memory");
  } catch (const std::exception& e) {
    return api.CreateStatus(code, e.what());
  } catch (...) {  // an allocator of another C++ runtime may throw a type that is not known here
    return api.CreateStatus(ORT_FAIL, "HinaMoE: a failure of an unknown type");
  }
}

}  // namespace hina
