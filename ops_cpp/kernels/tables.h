// The tables that dispatch, tests and benchmarks all read: every kernel of every family, one array per file.
// A new kernel is a new entry of an array; a new ISA is a new array here and in dispatch.cc.
#pragma once

#include "kernels/activation/activation.h"
#include "kernels/convert/convert.h"
#include "kernels/dot/dot.h"

namespace hina {

constexpr int kActivationAvx2Count = 2;

extern const DotKernel kDotPortable[kDataTypeCount];
extern const ConvertKernel kConvertPortable[kDataTypeCount];
extern const ActivationKernel kActivationPortable[kActivationCount];
extern const DotKernel kDotAvx2[kDataTypeCount];
extern const ConvertKernel kConvertAvx2[kDataTypeCount];
extern const ActivationKernel kActivationAvx2[kActivationAvx2Count];

}  // namespace hina
