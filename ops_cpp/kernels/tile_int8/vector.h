// tile_int8, for every vector ISA: an ISA's file includes its vocabulary (kernels/simd), then this one, and makes the
// table. Here are packing and unpacking; the products are in multiply.h.
#pragma once

#include "kernels/tile_int8/layout.h"
#include "kernels/tile_int8/multiply.h"

namespace hina {
namespace {

using simd::Mask;

// A unit of up to kLanes tokens, which are the lanes: token t and those behind it in the panel. `values` are `count`
// rows of the unit, `stride` floats apart, with `tokens` tokens each.
HINA_INLINE void quantise_unit(const float* values, int64_t count, int64_t stride, int64_t tokens, const Panel& panel,
                               int64_t unit, int t) {
  Floats amax = simd::zero();
  Mask finite = simd::equal(amax, amax);
  for (int64_t i = 0; i < count; ++i) {
    const Floats size = simd::absolute(load_first(values + i * stride, tokens));
    finite = simd::both(finite, simd::greater(simd::broadcast(__builtin_inff()), size));
    amax = simd::maximum(amax, size);
  }
  const Floats top = simd::broadcast(127.0f), inverse = top / amax;
  const Mask used = simd::both(finite, simd::greater(amax, simd::broadcast(0x1.fffffep-101f)));  // 2^-100 at least
  Floats sum = simd::zero();
  char* codes = panel.codes_of(unit) + t * 4;
  for (int64_t i = 0; i < kUnit; i += 4, codes += panel.n * 4) {
    Floats code[4];
    HINA_UNROLL
    for (int64_t j = 0; j < 4; ++j) {
      const Floats value = load_first(values + (i + j) * stride, i + j < count ? tokens : 0);
      code[j] = simd::choose(used, simd::round_to_integer(value * inverse), simd::zero());
      sum = sum + code[j];
    }
    store_first(reinterpret_cast<int32_t*>(codes), simd::quads(code[0], code[1], code[2], code[3]), tokens);
  }
  const Floats scale = simd::choose(used, amax / top, simd::zero());
  const int64_t place = unit * panel.n + t;
  store_first(panel.scales + place, simd::choose(finite, scale, simd::broadcast(__builtin_nanf(""))), tokens);
  store_first(panel.sums + place, sum, tokens);
}

// The zeros of the pair that begins with `unit`.
HINA_INLINE void clear_between(const Panel& panel, int64_t unit) {
  if (unit % 2 == 0) std::memset(panel.codes_of(unit) + kUnit * panel.n, 0, static_cast<size_t>(kUnit * panel.n));
}

void pack(const float* const* tokens, const float* weights, int n, int64_t k, void* panel) {
  const Panel to(panel, k, n);
  for (int64_t unit = 0; unit < units_of(k); ++unit) {
    const int64_t from = unit * kUnit, count = k - from < kUnit ? k - from : kUnit;
    for (int t = 0; t < n; t += kLanes) {
      float values[kUnit * kLanes];
      for (int64_t i = 0; i < kUnit; i += kLanes) {
        Floats square[kLanes];
        HINA_UNROLL
        for (int j = 0; j < kLanes; ++j)
          square[j] = t + j >= n ? simd::zero()
                                 : load_first(tokens[t + j] + from + i, count - i) *
                                       simd::broadcast(weights == nullptr ? 1.0f : weights[t + j]);
        simd::transpose(square);
        HINA_UNROLL
        for (int j = 0; j < kLanes; ++j) simd::store(values + (i + j) * kLanes, square[j]);
      }
      quantise_unit(values, count, kLanes, n - t, to, unit, t);
    }
    clear_between(to, unit);
  }
}

void pack_rows(const float* values, int count, int n, int64_t from, int64_t k, void* panel) {
  const Panel to(panel, k, n);
  for (int i = 0; i < count; i += kUnit) {
    for (int t = 0; t < n; t += kLanes)
      quantise_unit(values + i * n + t, count - i < kUnit ? count - i : kUnit, n, n - t, to, (from + i) / kUnit, t);
    clear_between(to, (from + i) / kUnit);
  }
}

// The codes without their zero point, or as qdot.h has them.
template <bool mxfp4>
struct ByteTable {
  static constexpr int8_t kMxfp4[16] = {HINA_MXFP4_CODES};
  int8_t bytes[16];

  explicit HINA_INLINE ByteTable(bool centred) {
    for (int i = 0; i < 16; ++i)
      bytes[i] = static_cast<int8_t>((mxfp4 ? kMxfp4[i] : i) - (centred ? mxfp4 ? 12 : 8 : 0));
  }
};

template <bool mxfp4>
void unpack(const void* const* rows, int n, int64_t row_bytes, int64_t k, bool centred, void* bytes, int64_t stride) {
  const ByteTable<mxfp4> table(centred);
  const int64_t whole = (k + 1) / 2 < row_bytes ? (k + 1) / 2 : row_bytes;
  for (int r = 0; r < n; ++r) {
    const char* from = static_cast<const char*>(rows[r]);
    char* to = static_cast<char*>(bytes) + r * stride;
    int64_t i = 0;
    for (; i + 2 * kLanes <= whole; i += 2 * kLanes)
      simd::store(to + i * 2, simd::choose_bytes(table.bytes, simd::spread(from + i)));
    for (; i * 2 < stride; i += kUnit / 2) {  // what is left, and padding
      alignas(64) char part[4 * kLanes];
      const int64_t left = whole - i > 2 * kLanes ? 2 * kLanes : whole - i;
      simd::store(part, simd::choose_bytes(table.bytes, simd::spread(from + i, left > 0 ? left : 0)));
      std::memcpy(to + i * 2, part, kUnit);
    }
  }
}

template <WeightFormat format>
constexpr TileKernel entry(const char* name, Isa isa, int from_tokens) {
  constexpr bool mxfp4 = format == WeightFormat::kMxfp4, nibbles = mxfp4 || format == WeightFormat::kInt4;
  return {name,
          isa,
          format,
          0,
          from_tokens,
          panel_bytes,
          pack,
          pack_rows,
          nibbles ? unpack<mxfp4> : nullptr,
          multiply<format>};
}

}  // namespace
}  // namespace hina
