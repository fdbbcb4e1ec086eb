// Types that kernels, the algorithm and the op share. Plain types only: files compiled with their own -m flags
// include this header, and an inline function in it could be linked from the wrong one.
#pragma once

#include <cstdint>

namespace hina {

// How values lie in a tensor. The first three are types of activations and of plain weights; the others are those of
// zero points and scales. kUint4: two to a byte, the first in the low half. kE8M0: 2^(e - 127), 255 is NaN (OCP MX).
enum class DataType : int { kFloat32 = 0, kFloat16, kBFloat16, kUint8, kInt8, kUint4, kE8M0 };
constexpr int kFloatTypeCount = 3;
constexpr int kDataTypeCount = 7;

// How the weights of a matrix are coded. A weight of the last four is (code - zero point) * scale, with one scale, and
// one zero point, for each block of a row:
//   kUint8  a byte
//   kInt8   a byte of two's complement; kernels see its code plus 128, and its zero point likewise
//   kInt4   four bits, two to a byte, the first in the low half (MatMulNBits, QMoE)
//   kMxfp4  four bits as kInt4, that stand for E2M1; a kernel's code is twice the value plus 12, from kMxfp4Codes, its
//           zero point 12 and its scale half of the E8M0 one (OCP MX v1.0)
enum class WeightFormat : int { kFloat = 0, kUint8, kInt8, kInt4, kMxfp4 };
constexpr int kWeightFormatCount = 5;

// Ordered: a later entry needs a newer CPU and is preferred. HINA_ISA names one of them as the cap.
//   kAvx2        AVX2, FMA, F16C
//   kAvx512      AVX-512 F, BW, VL, DQ
//   kAvx512Vnni  and VNNI
//   kAvx512Bf16  and BF16
enum class Isa : int { kPortable = 0, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16 };
constexpr int kIsaCount = 5;

enum class Activation : int { kSilu = 0, kGelu, kGeluTanh, kRelu, kRelu2, kIdentity };
constexpr int kActivationCount = 6;

}  // namespace hina
