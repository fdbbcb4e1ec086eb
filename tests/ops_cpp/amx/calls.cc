// A library for tests of the emulator's counts: instructions of AMX on demand.
#include "kernels/tile/amx.h"

namespace amx = hina::amx;

// Loads `rows` rows of `row_bytes` bytes, `stride` apart, `times` times.
extern "C" void load_tiles(const void* at, int64_t stride, int rows, int row_bytes, int times) {
  amx::Config config;
  config.shape(0, rows, row_bytes);
  amx::configure(config);
  for (int i = 0; i < times; ++i) amx::load<0>(at, stride);
  amx::release();
}
