// From the tables to the kernels one layer uses: for each family the newest ISA not above the chosen one.
#pragma once

#include <vector>

#include "kernels/tables.h"

namespace hina {

// Indexed by the enumerations of types.h; the entries of kFloat among the formats are nullptr.
struct KernelSet {
  DotFn dot[kFloatTypeCount];  // by weight type; tokens are float32
  DotFn dot_bfloat16;          // weights and tokens are bfloat16; nullptr below kAvx512Bf16
  QDotKernel qdot[kWeightFormatCount];
  DequantiseFn dequantise[kWeightFormatCount];
  WidenFn widen[kDataTypeCount];
  NarrowFn narrow[kDataTypeCount];
  ActivationFn activation[kActivationCount];
  RouteKernel route;
  ScatterFn scatter;
  TileKernel tile_bf16[kTileTerms];          // by terms - 1; without a name where AMX is not to be used
  bool amx;                                  // some entry of these needs it
  bool tiles_round_weights;                  // to bfloat16, where activations are no int8 codes
  TileKernel tile_int8[kWeightFormatCount];  // by weight format
};

// All entries of one family, portable first.
std::vector<DotKernel> dot_kernels();
std::vector<QDotKernel> qdot_kernels();
std::vector<DequantiseKernel> dequantise_kernels();
std::vector<ConvertKernel> convert_kernels();
std::vector<ActivationKernel> activation_kernels();
std::vector<RouteKernel> route_kernels();
std::vector<ScatterKernel> scatter_kernels();
std::vector<TileKernel> tile_kernels();

// Entries that need AMX only if `amx`.
KernelSet select_kernels(Isa isa, bool amx = false);

// The name of the kernel that `select_kernels` takes for a dot product with plain weights of `type`.
const char* dot_kernel_name(Isa isa, DataType type);

}  // namespace hina
