// Several ONNX Runtimes in one process, each with its own table of functions, share the one library.
// two_runtimes_test LIBRARY MODEL HIDDEN_SIZE RUNTIME...: registers with each runtime, runs MODEL there, and compares.
#include <dlfcn.h>
#include <onnxruntime_c_api.h>

#include <string>
#include <vector>

#include "check.h"

namespace {

using Register = OrtStatus* (*)(OrtSessionOptions*, const OrtApiBase*);

void* symbol(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  CHECK(handle != nullptr, "%s", dlerror());
  void* found = dlsym(handle, name);
  CHECK(found != nullptr, "%s has no %s", library, name);
  return found;
}

std::vector<float> run(Register register_ops, const OrtApiBase* base, const char* model, int64_t hidden_size) {
  const OrtApi* api = base->GetApi(18);
  const auto ok = [&](OrtStatus* status) {
    CHECK(status == nullptr, "ONNX Runtime %s: %s", base->GetVersionString(), api->GetErrorMessage(status));
  };
  OrtEnv* env = nullptr;
  OrtSessionOptions* options = nullptr;
  OrtSession* session = nullptr;
  ok(api->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "test", &env));
  ok(api->CreateSessionOptions(&options));
  ok(register_ops(options, base));
  ok(api->CreateSession(env, model, options, &session));

  OrtMemoryInfo* memory = nullptr;
  ok(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  std::vector<float> x(static_cast<size_t>(3 * hidden_size));
  for (size_t i = 0; i < x.size(); ++i) x[i] = 0.01f * static_cast<float>(i % 97) - 0.4f;
  const int64_t shape[] = {3, hidden_size};
  OrtValue *input = nullptr, *output = nullptr;
  ok(api->CreateTensorWithDataAsOrtValue(memory, x.data(), x.size() * 4, shape, 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
                                         &input));
  const char* input_name = "hidden_states";
  const char* output_name = "output";
  ok(api->Run(session, nullptr, &input_name, &input, 1, &output_name, 1, &output));
  void* data = nullptr;
  ok(api->GetTensorMutableData(output, &data));
  const float* values = static_cast<float*>(data);
  std::vector<float> result(values, values + x.size());

  api->ReleaseValue(output);
  api->ReleaseValue(input);
  api->ReleaseMemoryInfo(memory);
  api->ReleaseSession(session);
  api->ReleaseSessionOptions(options);
  api->ReleaseEnv(env);
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc > 5, "usage: LIBRARY MODEL HIDDEN_SIZE RUNTIME RUNTIME...");
  const auto register_ops = reinterpret_cast<Register>(symbol(argv[1], "RegisterCustomOps"));
  std::vector<float> first;
  for (int i = 4; i < argc; ++i) {
    const auto get_base = reinterpret_cast<const OrtApiBase* (*)()>(symbol(argv[i], "OrtGetApiBase"));
    const std::vector<float> result = run(register_ops, get_base(), argv[2], std::atoll(argv[3]));
    if (first.empty()) first = result;
    CHECK(result == first, "%s gives another result", argv[i]);
    std::printf("ok %s\n", get_base()->GetVersionString());
  }
}
