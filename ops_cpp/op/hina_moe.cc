#include "op/hina_moe.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "moe/forward.h"
#include "moe/tile_rows.h"
#include "numa/layer.h"
#include "op/formats.h"
#include "op/inputs.h"
#include "op/parse.h"
#include "op/schema.h"
#include "runtime/isa.h"
#include "runtime/tuning.h"

namespace hina {
namespace {

// Upper bound of concurrent workers: the CPUs this process may use. The size of ONNX Runtime's pool is not told to
// custom ops; surplus calls find no work and return.
int worker_bound() {
  constexpr int kLeast = 8;  // also where affinity says less: a session may ask for more threads than CPUs
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const bool known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
  // More than 1024 CPUs do not fit in the mask.
  return std::max(known ? CPU_COUNT(&allowed) : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)), kLeast);
}

bool verbose() {
  const char* text = std::getenv("HINA_VERBOSE");
  return text != nullptr && *text != '\0' && *text != '0';
}

// A buffer from the session's own allocator, which keeps it for the next call.
class Buffer {
 public:
  Buffer(const OrtApi& api, OrtAllocator* allocator, int64_t bytes) : api_(api), allocator_(allocator) {
    check(api, api.AllocatorAlloc(allocator, static_cast<size_t>(bytes) + kAlignment, &data_));
    if (data_ == nullptr) throw Error("HinaMoE: out of memory for " + std::to_string(bytes) + " bytes of workspace");
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (OrtStatus* status = api_.AllocatorFree(allocator_, data_)) api_.ReleaseStatus(status);
  }

  void* aligned() const {
    const uintptr_t at = reinterpret_cast<uintptr_t>(data_);
    return static_cast<std::byte*>(data_) + (kAlignment - at % kAlignment) % kAlignment;
  }

 private:
  static constexpr size_t kAlignment = 64;
  const OrtApi& api_;
  OrtAllocator* allocator_;
  void* data_ = nullptr;
};

class Kernel {
 public:
  Kernel(const OrtApi& api, const OrtKernelInfo* info, std::optional<NumaMode> numa)
      : api_(api), node_(parse_node(api, info)) {
    const IsaChoice choice = choose_isa();
    if (!choice.error.empty()) throw Error("HinaMoE node '" + node_.name + "': " + choice.error);
    kernels_ = select_kernels(choice.isa, choice.amx);
    kernels_.tiles_round_weights = choice.cap == "amx";
    set_tile_thresholds();
    workers_ = worker_bound();
    numa_ = std::make_unique<LayerNuma>(read_topology(), choose_numa(numa), node_.params);
    if (!numa_->error().empty()) fail(numa_->error());
    report(choice, float_type(declared_info(api, info, kHiddenStates).type, "hidden_states"));
    if (!numa_->active()) numa_.reset();
    check(api, api.CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory_info_));
  }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  ~Kernel() { api_.ReleaseMemoryInfo(memory_info_); }

  const OrtApi& api() const { return api_; }

  // Runs concurrently on one object: everything a call changes is in its own workspace.
  void compute(OrtKernelContext* context) const {
    const Params& p = node_.params;
    Call call;
    const TensorInfo hidden = input(context, kHiddenStates, p.hidden_size, nullptr, &call.hidden_states);
    call.type = float_type(hidden.type, "hidden_states");
    call.tokens = 1;
    for (size_t axis = 0; axis + 1 < hidden.shape.size(); ++axis) call.tokens *= hidden.shape[axis];
    if (call.tokens > INT32_MAX)
      fail("hidden_states has " + std::to_string(call.tokens) + " tokens, expected fewer than 2^31");
    if (p.router.input == RouterInput::kLogits)
      call.router_logits_type = float_type(
          input(context, kRouterLogits, p.num_experts, &call.tokens, &call.router_logits).type, "router_logits");
    if (p.router.input == RouterInput::kTopK) {
      const TensorInfo ids = input(context, kTopKIds, p.top_k, &call.tokens, &call.topk_ids);
      call.topk_ids_are_int64 = ids.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
      call.topk_weights_type =
          float_type(input(context, kTopKWeights, p.top_k, &call.tokens, &call.topk_weights).type, "topk_weights");
    }
    call.output = output(context, 0, hidden.shape);
    call.tokens_per_expert = static_cast<int64_t*>(optional_output(context, 1, {p.num_experts}));

    if (numa_ != nullptr) {
      if (const std::string news = numa_->look(); !news.empty()) report_numa(news);
      numa_->apply(call);
    }
    const int workers = static_cast<int>(std::min<int64_t>(workers_, most_tasks(p, call.tokens)));
    const int64_t bytes = workspace_bytes(p, kernels_, call, workers);
    if (bytes < 0) fail("the workspace for " + std::to_string(call.tokens) + " tokens is too large");
    OrtAllocator* allocator = nullptr;
    check(api_, api_.KernelContext_GetAllocator(context, memory_info_, &allocator));
    const auto release = [this](OrtAllocator* a) { api_.ReleaseAllocator(a); };
    std::string error;
    {
      const std::unique_ptr<OrtAllocator, decltype(release)> owned(allocator, release);
      const Buffer workspace(api_, allocator, bytes);
      Pool pool{api_, context, nullptr, numa_ == nullptr ? nullptr : &numa_->topology()};
      const Executor executor{&pool, parallel_for, numa_ == nullptr ? nullptr : current_node};
      error = forward(p, kernels_, call, workspace.aligned(), workers, executor);
      check(api_, pool.status);
    }
    if (!error.empty()) fail(error);
  }

 private:
  struct Pool {
    const OrtApi& api;
    const OrtKernelContext* context;
    OrtStatus* status;
    const Topology* topology;
  };

  static void parallel_for(void* self, void (*fn)(void*, size_t), size_t total, void* data) {
    Pool& pool = *static_cast<Pool*>(self);
    pool.status = pool.api.KernelContext_ParallelFor(pool.context, fn, total, 0, data);
  }

  static int current_node(void* self) { return static_cast<const Pool*>(self)->topology->current_worker(); }

  [[noreturn]] void fail(const std::string& text) const { throw Error("HinaMoE node '" + node_.name + "': " + text); }

  // Shape checks of a run-time input: the last axis, and as many tokens as hidden_states where `tokens` is given.
  TensorInfo input(OrtKernelContext* context, int index, int64_t last, const int64_t* tokens, const void** data) const {
    const OrtValue* value = nullptr;
    check(api_, api_.KernelContext_GetInput(context, static_cast<size_t>(index), &value));
    const char* name = kInputs[index].name;
    if (value == nullptr) fail(std::string("the input ") + name + " is missing");
    TensorInfo info = tensor_info(api_, value);
    int64_t count = 1;
    for (size_t axis = 0; axis + 1 < info.shape.size(); ++axis) count *= info.shape[axis];
    if (info.shape.empty() || info.shape.back() != last)
      fail(std::string(name) + " has shape " + shape_text(info.shape) + ", expected a last axis of " +
           std::to_string(last));
    if (tokens != nullptr && count != *tokens)
      fail(std::string(name) + " has shape " + shape_text(info.shape) + ", expected one row for each of the " +
           std::to_string(*tokens) + " tokens of hidden_states");
    *data = tensor_data(api_, value);
    return info;
  }

  void* output(OrtKernelContext* context, size_t index, const std::vector<int64_t>& shape) const {
    OrtValue* value = nullptr;
    check(api_, api_.KernelContext_GetOutput(context, index, shape.data(), shape.size(), &value));
    void* data = nullptr;
    if (value != nullptr) check(api_, api_.GetTensorMutableData(value, &data));
    return data;
  }

  void* optional_output(OrtKernelContext* context, size_t index, const std::vector<int64_t>& shape) const {
    size_t count = 0;
    check(api_, api_.KernelContext_GetOutputCount(context, &count));
    return index < count ? output(context, index, shape) : nullptr;
  }

  // The measured number of tokens from which on tiles are used, by kind of kernel.
  void set_tile_thresholds() {
    const Tuning tuning(cpu_features().model);
    if (!tuning.error().empty()) fail(tuning.error());
    const auto set = [&](TileKernel& kernel, const char* key) {
      kernel.from_tokens = tuning.amx_from(key, kernel.from_tokens);
    };
    set(kernels_.tile_bf16[0], "bf16");
    set(kernels_.tile_bf16[1], "bf16x2");
    const auto int8 = [&](WeightFormat format, const char* key) {
      set(kernels_.tile_int8[static_cast<int>(format)], key);
    };
    int8(WeightFormat::kUint8, "int8");
    int8(WeightFormat::kInt8, "int8");
    int8(WeightFormat::kInt4, "int4");
    int8(WeightFormat::kMxfp4, "mxfp4");
  }

  // HINA_VERBOSE=1: one line per node on stderr, when the session is made.
  void report(const IsaChoice& choice, DataType type) const {
    if (!verbose()) {
      if (numa_->refused()) report_numa(numa_->text());
      return;
    }
    const Params& p = node_.params;
    const auto projections = [&](const Expert& e, bool gated) {
      const ExpertTiles tiles = expert_tiles(e, gated, p, kernels_, type, INT32_MAX);
      const auto text = [&](const Matrix& matrix) {
        const bool bfloat16 = type == DataType::kBFloat16;
        return kernel_text(matrix, choice.isa, bfloat16, &matrix == &e.down ? tiles.down : tiles.first);
      };
      return (gated ? "gate " + text(e.gate) + ", " : "") + "up " + text(e.up) + ", down " + text(e.down);
    };
    std::string shared;
    if (p.shared_intermediate_size > 0)
      shared =
          "; shared I=" + std::to_string(p.shared_intermediate_size) + ": " + projections(p.shared, p.shared_gated);
    std::fprintf(stderr, "hina: HinaMoE '%s' E=%lld k=%lld H=%lld I=%lld: %s%s; %s; isa %s\n", node_.name.c_str(),
                 static_cast<long long>(p.num_experts), static_cast<long long>(p.top_k),
                 static_cast<long long>(p.hidden_size), static_cast<long long>(p.intermediate_size),
                 projections(p.experts[0], p.gated).c_str(), shared.c_str(), numa_->text().c_str(),
                 choice_text(choice).c_str());
  }

  // A line about nodes: all of them with HINA_VERBOSE=1, else the first that says that a mode asked for cannot be had.
  void report_numa(const std::string& text) const {
    static std::atomic<bool> told{false};
    if (verbose() || (numa_->refused() && !told.exchange(true)))
      std::fprintf(stderr, "hina: HinaMoE '%s' %s\n", node_.name.c_str(), text.c_str());
  }

  // "dot_f32_avx2", "int4:32 qdot_int4_avx2 with int8 activations", "int4:32 dequantised for dot_f32_avx2"; and where
  // tiles are used: "tile_bf16_avx512", or "dot_bf16_avx512, from 8 tokens on tile_bf16_avx512".
  std::string kernel_text(const Matrix& matrix, Isa isa, bool bfloat16_tokens, const TileKernel* tiles) const {
    const std::string vectors = kernel_text(matrix, isa, bfloat16_tokens);
    if (tiles == nullptr) return vectors;
    const std::string word = matrix.quantised() ? format_word(matrix.format, matrix.block) + " " : "";
    if (tiles->from_tokens <= 1) return word + tiles->name;
    return vectors + ", from " + std::to_string(tiles->from_tokens) + " tokens on " + tiles->name;
  }

  std::string kernel_text(const Matrix& matrix, Isa isa, bool bfloat16_tokens) const {
    const std::string word = matrix.quantised() ? format_word(matrix.format, matrix.block) + " " : "";
    if (matrix.quantised() && node_.params.int8_activations)
      return word + kernels_.qdot[static_cast<int>(matrix.format)].name + " with int8 activations";
    if (matrix.quantised()) return word + "dequantised for " + dot_kernel_name(isa, DataType::kFloat32);
    std::string name = dot_kernel_name(isa, matrix.type);
    if (bfloat16_tokens && matrix.type == DataType::kBFloat16)
      for (const DotKernel& kernel : dot_kernels())
        if (kernel.fn == kernels_.dot_bfloat16) name = kernel.name;
    return name;
  }

  const OrtApi& api_;
  Node node_;
  KernelSet kernels_;
  int workers_ = 1;
  std::unique_ptr<LayerNuma> numa_;  // nullptr: nodes do not matter
  OrtMemoryInfo* memory_info_ = nullptr;
};

// One op per activation type: up to 1.23 the type of an output must be known from the op or from its one input of any
// type. The other inputs take any type here and are checked when a kernel is made.
struct TypedOp : OrtCustomOp {
  ONNXTensorElementDataType activation_type;
  const OrtApi* api;
  std::optional<NumaMode> numa;
};

const TypedOp& typed(const OrtCustomOp* op) { return *static_cast<const TypedOp*>(op); }

OrtStatus* create(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
  const OrtApi& api = *typed(op).api;  // the one handed in may lack what the library asked for
  return guarded(api, ORT_INVALID_ARGUMENT, [&] { *kernel = new Kernel(api, info, typed(op).numa); });
}

OrtStatus* compute(void* self, OrtKernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(self);
  return guarded(kernel.api(), ORT_INVALID_ARGUMENT, [&] { kernel.compute(context); });
}

// The output's shape is that of hidden_states, handed on as it is: a copy made through dimension values would lose the
// symbolic ones. tokens_per_expert gets no shape: a node may lack that output, which this API cannot ask, and releases
// up to 1.26 then write out of bounds.
OrtStatus* infer_shapes(const OrtCustomOp* op, OrtShapeInferContext* context) {
  const OrtApi& api = *typed(op).api;
  return guarded(api, ORT_INVALID_ARGUMENT, [&] {
    OrtTensorTypeAndShapeInfo* hidden = nullptr;
    check(api, api.ShapeInferContext_GetInputTypeShape(context, 0, &hidden));
    check(api, api.ShapeInferContext_SetOutputTypeShape(context, 0, hidden));
  });
}

TypedOp make_op(const OrtApi& api, ONNXTensorElementDataType activation_type, bool infers_shapes,
                std::optional<NumaMode> numa) {
  TypedOp op{};
  op.api = &api;
  op.activation_type = activation_type;
  op.numa = numa;
  op.version = kMinimumOrtApi;
  op.GetName = [](const OrtCustomOp*) { return kOpType; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kFixedInputs + 1; };
  op.GetInputType = [](const OrtCustomOp* self, size_t index) {
    return index == kHiddenStates ? typed(self).activation_type : ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) {
    if (index >= kFixedInputs) return INPUT_OUTPUT_VARIADIC;
    return kInputs[index].required ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 2; };
  op.GetOutputType = [](const OrtCustomOp* self, size_t index) {
    return index == 0 ? typed(self).activation_type : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t index) {
    return index == 0 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  if (infers_shapes) op.InferOutputShapeFn = infer_shapes;
  op.GetStartVersion = [](const OrtCustomOp*) { return kOpsetVersion; };
  op.GetEndVersion = [](const OrtCustomOp*) { return INT32_MAX; };
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> make_hina_moe_ops(const OrtApi& api, bool infers_shapes, std::optional<NumaMode> numa) {
  std::vector<const OrtCustomOp*> ops;
  for (const auto type : {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
                          ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16})
    ops.push_back(new TypedOp(make_op(api, type, infers_shapes, numa)));
  return ops;
}

}  // namespace hina
