// peak, AMX: products of full tiles, 2 x 2 of rows and tokens, that stay in their tiles. Measured 2026-11-30, Emerald
// Rapids: 2640 GFLOP/s of bfloat16, one product of 16 x 16 x 32 in 16 cycles.
#include "kernels/tile/amx.h"

#include "kernels/peak/peak.h"

namespace hina {
namespace {

constexpr int kTileBytes = 16 * 64;

HINA_INLINE void fill(uint16_t (&tile)[kTileBytes / 2], uint16_t value) {
  for (uint16_t& pair : tile) pair = value;
}

// `a` and `b`: 2 and 3, in the two bytes of a bfloat16, or in each of them.
template <typename Sum, typename F>
HINA_INLINE double products(int64_t steps, uint16_t a, uint16_t b, F step) {
  alignas(64) uint16_t rows[kTileBytes / 2], tokens[kTileBytes / 2];
  alignas(64) Sum sums[4][kTileBytes / 4];
  fill(rows, a), fill(tokens, b);
  amx::Config config;
  for (int i = 0; i < 8; ++i) config.shape(i, 16, 64);
  amx::configure(config);
  amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
  amx::load<4>(rows, 64), amx::load<5>(rows, 64), amx::load<6>(tokens, 64), amx::load<7>(tokens, 64);
  do step();
  while (--steps > 0);
  amx::store<0>(sums[0], 64), amx::store<1>(sums[1], 64), amx::store<2>(sums[2], 64), amx::store<3>(sums[3], 64);
  amx::release();
  double sum = 0;
  for (const auto& tile : sums)
    for (const Sum one : tile) sum += static_cast<double>(one);
  return sum;
}

double bfloat16(int64_t steps) {
  return products<float>(steps, 0x4000, 0x4040, []() HINA_INLINE_LAMBDA {
    amx::multiply_bf16<0, 4, 6>(), amx::multiply_bf16<1, 4, 7>();
    amx::multiply_bf16<2, 5, 6>(), amx::multiply_bf16<3, 5, 7>();
  });
}

double int8(int64_t steps) {
  return products<int32_t>(steps, 0x0202, 0x0303, []() HINA_INLINE_LAMBDA {
    amx::multiply_signed<0, 4, 6>(), amx::multiply_signed<1, 4, 7>();
    amx::multiply_signed<2, 5, 6>(), amx::multiply_signed<3, 5, 7>();
  });
}

}  // namespace

const PeakKernel kPeakAmx[2] = {
    {"peak_bfloat16_amx", Isa::kPortable, PeakType::kBFloat16, 4 * 16 * 16 * 32, bfloat16},
    {"peak_int8_amx", Isa::kPortable, PeakType::kInt8, 4 * 16 * 16 * 64, int8},
};

}  // namespace hina
