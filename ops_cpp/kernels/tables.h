// The tables that dispatch, tests and benchmarks all read: every kernel of every family, one array per file.
// A new kernel is a new entry of an array; a new ISA is a new array here and in dispatch.cc.
#pragma once

#include "kernels/activation/activation.h"
#include "kernels/convert/convert.h"
#include "kernels/dequantise/dequantise.h"
#include "kernels/dot/dot.h"
#include "kernels/qdot/qdot.h"
#include "kernels/route/route.h"
#include "kernels/scatter/scatter.h"
#include "kernels/tile/tile.h"

namespace hina {

constexpr int kVectorActivations = 2;  // silu and gelu_tanh, the two that need an exponential
constexpr int kQuantisedFormats = kWeightFormatCount - 1;
constexpr int kTileTerms = 2;  // entries of bf16 tiles: one term, two terms

extern const DotKernel kDotPortable[kFloatTypeCount];
extern const DotKernel kDotAvx2[kFloatTypeCount];
extern const DotKernel kDotAvx512[kFloatTypeCount];
extern const DotKernel kDotAvx512Bf16[1];

extern const QDotKernel kQDotPortable[kQuantisedFormats];
extern const QDotKernel kQDotAvx2[kQuantisedFormats];
extern const QDotKernel kQDotAvx512Vnni[kQuantisedFormats];

extern const DequantiseKernel kDequantisePortable[kQuantisedFormats];
extern const DequantiseKernel kDequantiseAvx2[kQuantisedFormats];
extern const DequantiseKernel kDequantiseAvx512[kQuantisedFormats];

extern const ConvertKernel kConvertPortable[kDataTypeCount];
extern const ConvertKernel kConvertAvx2[kDataTypeCount];
extern const ConvertKernel kConvertAvx512[kDataTypeCount];

extern const ActivationKernel kActivationPortable[kActivationCount];
extern const ActivationKernel kActivationAvx2[kVectorActivations];
extern const ActivationKernel kActivationAvx512[kVectorActivations];

extern const RouteKernel kRoutePortable[1];
extern const RouteKernel kRouteAvx2[1];
extern const RouteKernel kRouteAvx512[1];

extern const ScatterKernel kScatterPortable[1];
extern const ScatterKernel kScatterAvx2[1];
extern const ScatterKernel kScatterAvx512[1];

extern const TileKernel kTileBf16Portable[kTileTerms];
extern const TileKernel kTileBf16Avx2[kTileTerms];
extern const TileKernel kTileBf16Avx512[kTileTerms];

extern const TileKernel kTileInt8Portable[kQuantisedFormats];
extern const TileKernel kTileInt8Avx2[kQuantisedFormats];
extern const TileKernel kTileInt8Avx512[kQuantisedFormats];

}  // namespace hina
