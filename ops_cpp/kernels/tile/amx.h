// AMX instructions. GCC 12's own intrinsics drop the stores that fill a configuration or a tile in local memory, so
// these are inline assembly, which also needs no -m flag.
#pragma once

#include <cstdint>

#include "kernels/simd/macros.h"

namespace hina {
// Internal linkage in every includer, see convert/scalar.h.
namespace {
namespace amx {

// What LDTILECFG reads (Intel SDM volume 1, chapter 18): tile t has rows[t] rows of row_bytes[t] bytes.
struct alignas(64) Config {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  HINA_INLINE void shape(int tile, int n_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(n_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(Config) == 64);

// Tiles are named by constants: what tells a lambda which one.
template <int i>
struct Constant {
  static constexpr int value = i;
};

HINA_INLINE void configure(const Config& config) { __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory"); }
// What the thread has; all zeros where it has none.
HINA_INLINE void store_configuration(Config& config) { __asm__ volatile("sttilecfg %0" : "=m"(config) : : "memory"); }
// Back to none.
HINA_INLINE void release() { __asm__ volatile("tilerelease" : : : "memory"); }

template <int tile>
HINA_INLINE void zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile));
}
template <int tile>
HINA_INLINE void load(const void* at, int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(tile), "r"(at), "r"(stride) : "memory");
}
template <int tile>
HINA_INLINE void store(void* at, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(tile), "r"(at), "r"(stride) : "memory");
}
// sums += rows x tokens, of bfloat16 pairs.
template <int sums, int rows, int tokens>
HINA_INLINE void multiply_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(tokens));
}
// The same of int8 quads; rows are unsigned in the second.
template <int sums, int rows, int tokens>
HINA_INLINE void multiply_signed() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(tokens));
}
template <int sums, int rows, int tokens>
HINA_INLINE void multiply_unsigned() {
  __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(tokens));
}

}  // namespace amx
}  // namespace
}  // namespace hina
