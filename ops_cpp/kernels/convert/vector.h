// convert, for every vector ISA: an ISA's file includes its vocabulary, then this one, and makes the table. A
// partial last vector goes through a Tail. Measured 2026-11-29, Emerald Rapids, billions of values per second, AVX2 and
// AVX-512: widen bfloat16 6.7 and 6.8 (the stores are the limit), uint8 8.6 and 11; narrow bfloat16 4.0 and 7.1.
#pragma once

#include "kernels/convert/convert.h"

namespace hina {
namespace {

template <DataType type>
void widen(const void* source, float* target, int64_t n) {
  const char* from = static_cast<const char*>(source);
  int64_t i = 0;
  for (; i + simd::kLanes <= n; i += simd::kLanes, from += simd::kBytes<type>)
    simd::store(target + i, simd::widen<type>(from));
  if (i == n) return;
  const simd::Tail tail(n - i);
  simd::store(target + i, simd::widen<type>(from, tail), tail);
}

template <DataType type>
void narrow(const float* source, void* target, int64_t n) {
  char* to = static_cast<char*>(target);
  int64_t i = 0;
  for (; i + simd::kLanes <= n; i += simd::kLanes, to += simd::kBytes<type>)
    simd::narrow<type>(simd::load(source + i), to);
  if (i == n) return;
  const simd::Tail tail(n - i);
  simd::narrow<type>(simd::load(source + i, tail), to, tail);
}

}  // namespace
}  // namespace hina
