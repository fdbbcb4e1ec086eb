// tile_bf16, portable C++: the reference of the family. Every sum is formed in the order of TDPBF16PS, and rounded as
// it rounds, so that results are those of the AMX entries to the bit: of each step, the even and the odd values of k
// are added up from zero, and the sum of the two is added to what the steps before it left.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/convert/scalar.h"
#include "kernels/tables.h"
#include "kernels/tile_bf16/layout.h"

namespace hina {
namespace {

// What the instruction does to subnormal inputs and results.
float flush(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

// One rounding: the product is exact in float64, and so many more bits do not round a sum of two float32 twice.
float multiply_add(float a, float b, float sum) {
  return flush(static_cast<float>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(sum)));
}

template <int terms>
void put(float value, int64_t i, int t, int n, void* panel) {
  for (int term = 0; term < terms; ++term) {
    const uint16_t bits = bfloat_of_float(value);
    const int64_t group = (i / kStep * terms + term) * kStepGroups + i % kStep / 2;
    static_cast<uint16_t*>(panel)[(group * n + t) * 2 + i % 2] = bits;
    const float rounded = float_of_bfloat(bits);
    value = std::isfinite(rounded) ? value - rounded : 0.0f;  // infinity stays infinity
  }
}

template <int terms>
void pad(int t, int n, int64_t k, void* panel) {
  for (int64_t i = k; i < steps_of(k) * kStep; ++i) put<terms>(0.0f, i, t, n, panel);
}

template <int terms>
void pack(const float* const* tokens, const float* weights, int n, int64_t k, void* panel) {
  for (int t = 0; t < n; ++t) {
    const float weight = weights == nullptr ? 1.0f : weights[t];
    for (int64_t i = 0; i < k; ++i) put<terms>(load<DataType::kFloat32>(tokens[t], i) * weight, i, t, n, panel);
    pad<terms>(t, n, k, panel);
  }
}

template <int terms>
void pack_rows(const float* values, int count, int n, int64_t from, int64_t k, void* panel) {
  for (int t = 0; t < n; ++t) {
    for (int i = 0; i < count; ++i) put<terms>(values[i * n + t], from + i, t, n, panel);
    if (from + count == k) pad<terms>(t, n, k, panel);
  }
}

// sums[t] += the products of the `left` values of a row at `row` with a step of n tokens.
void add_step(const char* row, int64_t left, const uint16_t* tokens, int n, float* sums) {
  float parts[2][kPanelTokens] = {};
  for (int64_t i = 0; i < std::min(left, kStep); ++i) {
    const float weight = flush(load<DataType::kBFloat16>(row, i));
    float* part = parts[i % 2];
    for (int t = 0; t < n; ++t) {
      const float token = flush(float_of_bfloat(tokens[(i / 2 * n + t) * 2 + i % 2]));
      part[t] = multiply_add(weight, token, part[t]);
    }
  }
  for (int t = 0; t < n; ++t) sums[t] = flush(sums[t] + flush(parts[0][t] + parts[1][t]));
}

template <int terms>
void multiply(const TileRows* parts, const void* const* panels, int n_tokens, int64_t k, float* out) {
  for (int p = 0; p * kPanelTokens < n_tokens; ++p) {
    const int n = std::min(kPanelTokens, n_tokens - p * kPanelTokens);
    for (const TileRows* rows : {parts, parts + 1}) {
      for (int r = 0; r < rows->n; ++r, out += n) {
        const char* row = static_cast<const char*>(rows->first) + r * rows->stride;
        std::fill(out, out + n, 0.0f);
        for (int64_t step = 0; step < steps_of(k) * terms; ++step) {
          const int64_t i = step / terms * kStep;
          const uint16_t* tokens = static_cast<const uint16_t*>(panels[p]) + step * kStep * n;
          add_step(row + i * 2, k - i, tokens, n, out);
        }
      }
    }
  }
}

template <int terms>
constexpr TileKernel entry(const char* name) {
  return {name,    Isa::kPortable, WeightFormat::kFloat, terms, 1, panel_bytes<terms>, pack<terms>, pack_rows<terms>,
          nullptr, multiply<terms>};
}

}  // namespace

const TileKernel kTileBf16Portable[kTileTerms] = {entry<1>("tile_bf16_portable"), entry<2>("tile_bf16x2_portable")};

}  // namespace hina
