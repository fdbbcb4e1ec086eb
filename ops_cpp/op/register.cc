// The two symbols that the library exports.
#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "bench/machine.h"
#include "kernels/dispatch.h"
#include "op/hina_moe.h"
#include "op/json.h"
#include "op/numa_query.h"
#include "op/schema.h"
#include "runtime/isa.h"
#include "runtime/tuning.h"

#define HINA_EXPORT extern "C" __attribute__((visibility("default")))

namespace hina {
namespace {

// Releases before 1.24 crash in shape inference of a custom op when an optional input is left out.
bool can_infer_shapes(const char* version) {
  int major = 0, minor = 0;
  return std::sscanf(version, "%d.%d", &major, &minor) == 2 && (major > 1 || minor >= 24);
}

// The domain of one ONNX Runtime, for sessions that ask for one mode of NUMA: kernels of the API version that is asked
// for cannot ask their session. A process may hold several ONNX Runtimes (a Python wheel and a native component, say),
// each with its own table of functions. Session options use a domain without saying for how long: it lives as long as
// the process.
OrtCustomOpDomain* domain(const OrtApi& api, const char* version, std::optional<NumaMode> numa) {
  static std::mutex mutex;
  static std::map<std::pair<const OrtApi*, std::optional<NumaMode>>, OrtCustomOpDomain*> domains;
  const std::lock_guard<std::mutex> lock(mutex);
  OrtCustomOpDomain*& known = domains[{&api, numa}];
  if (known == nullptr) {
    OrtCustomOpDomain* made = nullptr;
    check(api, api.CreateCustomOpDomain(kDomain, &made));
    for (const OrtCustomOp* op : make_hina_moe_ops(api, can_infer_shapes(version), numa))
      check(api, api.CustomOpDomain_Add(made, op));
    known = made;
  }
  return known;
}

// Of the configuration entry hina.numa, which must be there when the library is registered.
std::optional<NumaMode> numa_entry(const OrtApi& api, const OrtSessionOptions* options) {
  constexpr const char* kEntry = "hina.numa";
  int there = 0;
  check(api, api.HasSessionConfigEntry(options, kEntry, &there));
  if (there == 0) return std::nullopt;
  size_t size = 0;
  check(api, api.GetSessionConfigEntry(options, kEntry, nullptr, &size));
  std::string word(size, '\0');
  check(api, api.GetSessionConfigEntry(options, kEntry, word.data(), &size));
  word.resize(size > 0 ? size - 1 : 0);
  std::string error;
  const std::optional<NumaMode> mode = parse_numa_mode(word, "the session config entry hina.numa", error);
  if (!mode) throw Error("hina-ort: " + error);
  return mode;
}

std::string cpu_info_json() {
  const CpuFeatures& cpu = cpu_features();
  const IsaChoice choice = choose_isa();
  const bool known = choice.error.empty();
  return "{\"vendor\":" + json_string(cpu.vendor) + ",\"model\":" + json_string(cpu.model) +
         ",\"features\":" + json_strings(cpu.names) +
         ",\"isa\":" + (known ? json_string(isa_name(choice.isa)) : "null") +
         ",\"isa_reason\":" + json_string(known ? choice.reason : choice.error) +
         ",\"amx\":" + (known && choice.amx ? "true" : "false") + ",\"amx_reason\":" + json_string(choice.amx_reason) +
         ",\"tuning\":" + json_string(tuning_path()) +
         ",\"isa_cap\":" + (choice.cap.empty() ? "null" : json_string(choice.cap)) +
         ",\"minimum_ort_api\":" + std::to_string(kMinimumOrtApi) + "}";
}

template <typename Kernel>
void append_kernels(std::string& out, const char* family, const std::vector<Kernel>& kernels) {
  for (const Kernel& kernel : kernels)
    out += std::string(out.size() > 1 ? "," : "") + "{\"name\":" + json_string(kernel.name) +
           ",\"family\":" + json_string(family) + ",\"isa\":" + json_string(isa_name(kernel.isa)) + "}";
}

std::string kernels_json() {
  std::string out = "[";
  append_kernels(out, "dot", dot_kernels());
  append_kernels(out, "qdot", qdot_kernels());
  append_kernels(out, "dequantise", dequantise_kernels());
  append_kernels(out, "convert", convert_kernels());
  append_kernels(out, "activation", activation_kernels());
  append_kernels(out, "route", route_kernels());
  append_kernels(out, "scatter", scatter_kernels());
  append_kernels(out, "tile", tile_kernels());
  return out + "]";
}

}  // namespace
}  // namespace hina

// ONNX Runtime calls this from SessionOptions.register_custom_ops_library.
HINA_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace hina;
  const OrtApi* api = base->GetApi(kMinimumOrtApi);
  if (api == nullptr) {
    const std::string message = "hina-ort " HINA_VERSION " needs ONNX Runtime 1." + std::to_string(kMinimumOrtApi) +
                                " or later, but this is ONNX Runtime " + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_FAIL, message.c_str());
  }
  return guarded(*api, ORT_FAIL, [&] {
    const std::optional<NumaMode> numa = numa_entry(*api, options);
    check(*api, api->AddCustomOpDomain(options, domain(*api, base->GetVersionString(), numa)));
  });
}

// JSON about the library: topic "version", "cpu_info", "kernels", "op_schema", "topology [ROOT]" or
// "placement ADDRESS BYTES" (see op/numa_query.h), or "machine THREADS PATH" (see bench/machine.h; takes seconds);
// nullptr for any other topic. The text is valid until the calling thread asks again.
HINA_EXPORT const char* HinaQuery(const char* topic) {
  using namespace hina;
  thread_local std::string answer;
  try {
    const std::string name = topic == nullptr ? "" : topic;
    if (name == "version")
      answer = json_string(HINA_VERSION);
    else if (name == "cpu_info")
      answer = cpu_info_json();
    else if (name == "kernels")
      answer = kernels_json();
    else if (name == "op_schema")
      answer = schema_json();
    else if (name == "topology" || name.starts_with("topology "))
      answer = topology_json(name.substr(std::min<size_t>(name.size(), 9)));
    else if (name.starts_with("placement "))
      answer = placement_json(name.substr(10));
    else if (name.starts_with("machine "))
      answer = machine_json(name.substr(8));
    else
      return nullptr;
    return answer.c_str();
  } catch (...) {  // out of memory: nothing may leave a C function
    return nullptr;
  }
}
