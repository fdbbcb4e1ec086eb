// What qdot's `few` and `pack` ask of the memory in advance, while they go through a block of rows.
//
// A core waits for at most so many lines as it has buffers (16 here): by itself, or with prefetch instructions alone,
// it reads 9 to 10 GB/s of nibbles. What reads faster is the hardware's prefetcher, which follows one ascending stream
// in each page: so rows are taken from places that are a page or more apart, and the beginning of each of them, where
// it does not know yet what comes, is asked for before the last block ends. Measured 2026-11-29, one thread of an
// Emerald Rapids VM, nibbles from memory with their products: rows that lie side by side 9.8 GB/s; places of 4 KiB 13,
// with kAhead 15; places of 1.5 KiB 6, with kAhead 11; a plain read loop 17. Whole layers gained 10 to 30 % at 1 to 16
// tokens.
#pragma once

#include <immintrin.h>

#include "kernels/qdot/qdot.h"
#include "kernels/simd/macros.h"

namespace hina {
// Internal linkage, see convert/scalar.h.
namespace {

constexpr int64_t kAhead = 1024;  // bytes
constexpr int64_t kLine = 64;

HINA_INLINE uintptr_t address(const void* at) { return reinterpret_cast<uintptr_t>(at); }
HINA_INLINE void prefetch(uintptr_t at) { _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0); }

// The rows r, r + groups, r + 2 groups .. of a block are read together, line by line, for each r below `groups`; so
// each of these places is one run of bytes. Where the rows of a place lie apart, as those of one NUMA node may, nothing
// beyond a row is asked for: what lies there is not read, or by others.
class Ahead {
 public:
  HINA_INLINE Ahead(const QRows& rows, int groups, int64_t lines_of_row) {
    if (rows.n == 0) return;
    const uintptr_t first = address(rows.values[0]);
    const uintptr_t last = address(rows.values[groups < rows.n ? groups - 1 : rows.n - 1]);
    const bool apart = last - first != static_cast<uintptr_t>((groups - 1) * rows.row_bytes);
    stride_ = apart ? 0 : rows.row_bytes;
    place_ = apart ? rows.row_bytes : groups * rows.row_bytes;
    // From the end of a place, which is where the next one begins, to the same place of the next block.
    if (rows.next.values != nullptr && !apart)
      jump_ = address(rows.next.values) - first - static_cast<uintptr_t>(place_);
    const int64_t calls = groups * lines_of_row;
    for (int i = 0; i < 2; ++i) {
      factors_[i] = address(rows.next.factors[i]);
      steps_[i] = static_cast<uintptr_t>(rows.next.factor_bytes[i] / calls);
    }
  }

  // From byte `at` of row r to what to ask for.
  HINA_INLINE uintptr_t distance(int r, int64_t at) const {
    return static_cast<uintptr_t>(kAhead) + (r * stride_ + at + kAhead < place_ ? 0 : jump_);
  }

  // To be called once for each line of the rows that are read together: the next part of the next scales.
  HINA_INLINE void fetch_factors() {
    HINA_UNROLL
    for (int i = 0; i < 2; ++i) {
      prefetch(factors_[i]);
      factors_[i] += steps_[i];
    }
  }

 private:
  int64_t stride_ = 0, place_ = 0;
  uintptr_t jump_ = static_cast<uintptr_t>(-kAhead), factors_[2] = {}, steps_[2] = {};
};

}  // namespace
}  // namespace hina
