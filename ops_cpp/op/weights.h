// The weight tensors of one node: which there are, whether they fit one another, and where each expert's rows lie.
#pragma once

#include <string>

#include "moe/params.h"
#include "op/attributes.h"
#include "op/inputs.h"

namespace hina {

// Fills the sizes, experts and shared expert of `params`, whose num_experts is known. Returns the tensors that say what
// H, I and S are, for messages about others. Throws Error for whatever does not fit.
std::string read_weights(const Inputs& inputs, const Attributes& attributes, Params& params);

}  // namespace hina
