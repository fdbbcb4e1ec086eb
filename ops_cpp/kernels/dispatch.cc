#include "kernels/dispatch.h"

#include <cstddef>

namespace hina {
namespace {

template <typename Kernel, size_t n>
void append(std::vector<Kernel>& all, const Kernel (&table)[n]) {
  for (const Kernel& kernel : table) all.push_back(kernel);
}

}  // namespace

std::vector<DotKernel> dot_kernels() {
  std::vector<DotKernel> all;
  append(all, kDotPortable);
#ifdef HINA_AVX2_KERNELS
  append(all, kDotAvx2);
#endif
  return all;
}

std::vector<ConvertKernel> convert_kernels() {
  std::vector<ConvertKernel> all;
  append(all, kConvertPortable);
#ifdef HINA_AVX2_KERNELS
  append(all, kConvertAvx2);
#endif
  return all;
}

std::vector<ActivationKernel> activation_kernels() {
  std::vector<ActivationKernel> all;
  append(all, kActivationPortable);
#ifdef HINA_AVX2_KERNELS
  append(all, kActivationAvx2);
#endif
  return all;
}

KernelSet select_kernels(Isa isa) {
  KernelSet set{};
  for (const DotKernel& kernel : dot_kernels())
    if (kernel.isa <= isa) set.dot[static_cast<int>(kernel.weight_type)] = kernel.fn;
  for (const ConvertKernel& kernel : convert_kernels()) {
    if (kernel.isa > isa) continue;
    set.widen[static_cast<int>(kernel.type)] = kernel.widen;
    set.narrow[static_cast<int>(kernel.type)] = kernel.narrow;
  }
  for (const ActivationKernel& kernel : activation_kernels())
    if (kernel.isa <= isa) set.activation[static_cast<int>(kernel.activation)] = kernel.fn;
  return set;
}

const char* dot_kernel_name(Isa isa, DataType type) {
  const char* name = nullptr;
  for (const DotKernel& kernel : dot_kernels())
    if (kernel.isa <= isa && kernel.weight_type == type) name = kernel.name;
  return name;
}

}  // namespace hina
