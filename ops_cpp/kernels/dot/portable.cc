// dot, portable C++: the reference of the family. Eight partial sums, combined pairwise, so that a compiler may keep
// them in vector registers and so that the error grows with k / 8.
#include "kernels/convert/scalar.h"
#include "kernels/tables.h"

namespace hina {
namespace {

template <DataType type>
void dot(const void* const* rows, int n_rows, const void* const* tokens, int n_tokens, int64_t k, float* out,
         int64_t out_stride) {
  constexpr int kLanes = 8;
  for (int r = 0; r < n_rows; ++r) {
    for (int t = 0; t < n_tokens; ++t) {
      const void* x = tokens[t];
      float sum[kLanes] = {};
      int64_t i = 0;
      for (; i + kLanes <= k; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane)
          sum[lane] += load<type>(rows[r], i + lane) * load<DataType::kFloat32>(x, i + lane);
      for (int lane = 0; i < k; ++i, ++lane) sum[lane] += load<type>(rows[r], i) * load<DataType::kFloat32>(x, i);
      const float low = (sum[0] + sum[4]) + (sum[1] + sum[5]);
      const float high = (sum[2] + sum[6]) + (sum[3] + sum[7]);
      out[t * out_stride + r] = low + high;
    }
  }
}

}  // namespace

const DotKernel kDotPortable[kFloatTypeCount] = {
    {"dot_f32_portable", Isa::kPortable, DataType::kFloat32, DataType::kFloat32, dot<DataType::kFloat32>},
    {"dot_f16_portable", Isa::kPortable, DataType::kFloat16, DataType::kFloat32, dot<DataType::kFloat16>},
    {"dot_bf16_portable", Isa::kPortable, DataType::kBFloat16, DataType::kFloat32, dot<DataType::kBFloat16>},
};

}  // namespace hina
