// From a node of the model file to moe::Params. Nothing in a model file is trusted: every attribute, type and shape is
// checked here, once, when the session is made.
#pragma once

#include <string>

#include "moe/params.h"
#include "op/ort_api.h"

namespace hina {

struct Node {
  std::string name;  // for messages
  Params params;
};

// Throws Error with one sentence that names the tensor or attribute, what was expected and what came.
Node parse_node(const OrtApi& api, const OrtKernelInfo* info);

}  // namespace hina
