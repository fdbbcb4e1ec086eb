// Types that kernels, the algorithm and the op share. Plain types only: files compiled with their own -m flags
// include this header, and an inline function in it could be linked from the wrong one.
#pragma once

#include <cstdint>

namespace hina {

enum class DataType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
constexpr int kDataTypeCount = 3;

// Ordered: a later entry needs a newer CPU and is preferred. HINA_ISA names one of them as the cap.
enum class Isa : int { kPortable = 0, kAvx2 = 1 };
constexpr int kIsaCount = 2;

enum class Activation : int { kSilu = 0, kGelu, kGeluTanh, kRelu, kRelu2, kIdentity };
constexpr int kActivationCount = 6;

}  // namespace hina
