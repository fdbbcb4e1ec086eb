#include "kernels/dispatch.h"

#include <cstddef>

#ifdef HINA_X86_KERNELS
#define HINA_X86(...) , __VA_ARGS__
#else
#define HINA_X86(...)
#endif

namespace hina {
namespace {

template <typename Kernel, size_t... n>
std::vector<Kernel> join(const Kernel (&... tables)[n]) {
  std::vector<Kernel> all;
  const auto append = [&](const auto& table) {
    for (const Kernel& kernel : table) all.push_back(kernel);
  };
  (append(tables), ...);
  return all;
}

}  // namespace

std::vector<DotKernel> dot_kernels() { return join(kDotPortable HINA_X86(kDotAvx2, kDotAvx512, kDotAvx512Bf16)); }

std::vector<QDotKernel> qdot_kernels() { return join(kQDotPortable HINA_X86(kQDotAvx2, kQDotAvx512Vnni)); }

std::vector<DequantiseKernel> dequantise_kernels() {
  return join(kDequantisePortable HINA_X86(kDequantiseAvx2, kDequantiseAvx512));
}

std::vector<ConvertKernel> convert_kernels() { return join(kConvertPortable HINA_X86(kConvertAvx2, kConvertAvx512)); }

std::vector<ActivationKernel> activation_kernels() {
  return join(kActivationPortable HINA_X86(kActivationAvx2, kActivationAvx512));
}

std::vector<RouteKernel> route_kernels() { return join(kRoutePortable HINA_X86(kRouteAvx2, kRouteAvx512)); }

std::vector<ScatterKernel> scatter_kernels() { return join(kScatterPortable HINA_X86(kScatterAvx2, kScatterAvx512)); }

std::vector<TileKernel> tile_kernels() {
  std::vector<TileKernel> all = join(kTileBf16Portable HINA_X86(kTileBf16Avx2, kTileBf16Avx512));
  const std::vector<TileKernel> int8 = join(kTileInt8Portable HINA_X86(kTileInt8Avx2, kTileInt8Avx512));
  all.insert(all.end(), int8.begin(), int8.end());
  return all;
}

KernelSet select_kernels(Isa isa, bool amx) {
  KernelSet set{};
  for (const DotKernel& kernel : dot_kernels()) {
    if (kernel.isa > isa) continue;
    if (kernel.token_type == DataType::kFloat32)
      set.dot[static_cast<int>(kernel.weight_type)] = kernel.fn;
    else
      set.dot_bfloat16 = kernel.fn;
  }
  for (const QDotKernel& kernel : qdot_kernels())
    if (kernel.isa <= isa) set.qdot[static_cast<int>(kernel.format)] = kernel;
  for (const DequantiseKernel& kernel : dequantise_kernels())
    if (kernel.isa <= isa) set.dequantise[static_cast<int>(kernel.format)] = kernel.fn;
  for (const ConvertKernel& kernel : convert_kernels()) {
    if (kernel.isa > isa) continue;
    set.widen[static_cast<int>(kernel.type)] = kernel.widen;
    set.narrow[static_cast<int>(kernel.type)] = kernel.narrow;
  }
  for (const ActivationKernel& kernel : activation_kernels())
    if (kernel.isa <= isa) set.activation[static_cast<int>(kernel.activation)] = kernel.fn;
  for (const RouteKernel& kernel : route_kernels())
    if (kernel.isa <= isa) set.route = kernel;
  for (const ScatterKernel& kernel : scatter_kernels())
    if (kernel.isa <= isa) set.scatter = kernel.fn;
  set.amx = amx && isa > Isa::kPortable;
  for (const TileKernel& kernel : tile_kernels())
    if (amx && kernel.isa <= isa)
      (kernel.terms > 0 ? set.tile_bf16[kernel.terms - 1] : set.tile_int8[static_cast<int>(kernel.format)]) = kernel;
  return set;
}

const char* dot_kernel_name(Isa isa, DataType type) {
  const char* name = nullptr;
  for (const DotKernel& kernel : dot_kernels())
    if (kernel.isa <= isa && kernel.weight_type == type && kernel.token_type == DataType::kFloat32) name = kernel.name;
  return name;
}

}  // namespace hina
