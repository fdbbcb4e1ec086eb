// The products of AMX as the pseudocode of the Intel SDM has them (volume 2, TDPBF16PS and TDPBSSD): slow and obvious.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace reference {

struct Tile {
  int rows = 0, row_bytes = 0;
  uint8_t bytes[16][64] = {};

  template <typename T>
  T get(int row, int index) const {
    T value;
    std::memcpy(&value, &bytes[row][index * sizeof value], sizeof value);
    return value;
  }
  template <typename T>
  void set(int row, int index, T value) {
    std::memcpy(&bytes[row][index * sizeof value], &value, sizeof value);
  }
};

inline uint32_t bits(float value) {
  uint32_t u;
  std::memcpy(&u, &value, sizeof u);
  return u;
}

inline float from_bits(uint32_t u) {
  float value;
  std::memcpy(&value, &u, sizeof value);
  return value;
}

inline float bfloat16(uint16_t half) { return from_bits(static_cast<uint32_t>(half) << 16); }

// MXCSR does not count: subnormal operands and results are zeros of their sign, rounding is to nearest even, and
// whether a result is subnormal is seen after it was rounded.
inline float flushed(float x) { return (bits(x) & 0x7f800000) == 0 ? from_bits(bits(x) & 0x80000000) : x; }

inline float multiply_add(float a, float b, float c) { return flushed(std::fma(flushed(a), flushed(b), flushed(c))); }

inline float add(float a, float b) { return flushed(flushed(a) + flushed(b)); }

// sums [M, N] += left [M, K pairs] x right [K pairs, N].
inline void tdpbf16ps(Tile& sums, const Tile& left, const Tile& right) {
  for (int m = 0; m < sums.rows; ++m) {
    for (int n = 0; n < sums.row_bytes / 4; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < left.row_bytes / 4; ++k) {
        even = multiply_add(bfloat16(left.get<uint16_t>(m, 2 * k)), bfloat16(right.get<uint16_t>(k, 2 * n)), even);
        odd =
            multiply_add(bfloat16(left.get<uint16_t>(m, 2 * k + 1)), bfloat16(right.get<uint16_t>(k, 2 * n + 1)), odd);
      }
      sums.set(m, n, add(sums.get<float>(m, n), add(even, odd)));
    }
  }
}

// The same of quads of bytes, each operand of the type given; sums wrap around.
template <typename L, typename R>
void tdpb(Tile& sums, const Tile& left, const Tile& right) {
  for (int m = 0; m < sums.rows; ++m)
    for (int n = 0; n < sums.row_bytes / 4; ++n)
      for (int k = 0; k < left.row_bytes / 4; ++k)
        for (int i = 0; i < 4; ++i) {
          const int product = left.get<L>(m, 4 * k + i) * right.get<R>(k, 4 * n + i);
          sums.set(m, n, sums.get<uint32_t>(m, n) + static_cast<uint32_t>(product));
        }
}

}  // namespace reference
