// From the tables to the kernels one layer uses: for each family the newest ISA not above the chosen one.
#pragma once

#include <vector>

#include "kernels/tables.h"

namespace hina {

struct KernelSet {
  DotFn dot[kDataTypeCount];
  WidenFn widen[kDataTypeCount];
  NarrowFn narrow[kDataTypeCount];
  ActivationFn activation[kActivationCount];
};

// All entries of one family, portable first.
std::vector<DotKernel> dot_kernels();
std::vector<ConvertKernel> convert_kernels();
std::vector<ActivationKernel> activation_kernels();

KernelSet select_kernels(Isa isa);

// The name of the kernel that `select_kernels` takes for a dot product with weights of `type`.
const char* dot_kernel_name(Isa isa, DataType type);

}  // namespace hina
