// The HinaMoE custom op: ONNX Runtime's callbacks around parse_node and forward.
#pragma once

#include "op/ort_api.h"

namespace hina {

// The op's tables of callbacks, one for each activation type, valid for the life of the process. `api` must be of
// version kMinimumOrtApi or later. Without `infers_shapes` the output has a type but no shape until it is computed.
std::vector<const OrtCustomOp*> hina_moe_ops(const OrtApi* api, bool infers_shapes);

}  // namespace hina
