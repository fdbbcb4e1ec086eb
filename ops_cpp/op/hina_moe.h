// The HinaMoE custom op: ONNX Runtime's callbacks around parse_node and forward.
#pragma once

#include <optional>

#include "numa/mode.h"
#include "op/ort_api.h"

namespace hina {

// New tables of callbacks, one for each activation type, which live as long as the process: ONNX Runtime keeps pointers
// to them and does not say for how long. `api` must be of version kMinimumOrtApi or later. Without `infers_shapes` the
// output has a type but no shape until it is computed. `numa` is what the session's configuration asks for.
std::vector<const OrtCustomOp*> make_hina_moe_ops(const OrtApi& api, bool infers_shapes, std::optional<NumaMode> numa);

}  // namespace hina
