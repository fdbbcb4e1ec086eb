// tile_int8, portable C++: the contract of tile.h without AMX. A panel of n tokens: codes [units * 8][n] of quads, then
// scales [units][n], then sums [units][n]. Rows of bytes hold the codes of qdot.h, padded with zeros.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/qdot/codes.h"
#include "kernels/tables.h"

namespace hina {
namespace {

constexpr int kQuads = kUnit / 4;

int64_t units_of(int64_t k) { return (k + kUnit - 1) / kUnit; }

int64_t panel_bytes(int64_t k, int n) { return units_of(k) * n * (kUnit + 8); }

struct Panel {
  char* codes;
  float* scales;
  float* sums;

  Panel(const void* panel, int64_t k, int n) {
    codes = static_cast<char*>(const_cast<void*>(panel));
    scales = reinterpret_cast<float*>(codes + units_of(k) * n * kUnit);
    sums = scales + units_of(k) * n;
  }
};

void write_unit(const float* x, int64_t count, const Panel& panel, int64_t u, int t, int n) {
  const TokenUnit unit = quantise_unit(x, static_cast<int>(std::min<int64_t>(count, kUnit)));
  for (int q = 0; q < kQuads; ++q) std::memcpy(panel.codes + ((u * kQuads + q) * n + t) * 4, unit.codes + 4 * q, 4);
  panel.scales[u * n + t] = unit.scale;
  panel.sums[u * n + t] = unit.sum;
}

void pack(const float* const* tokens, const float* weights, int n, int64_t k, void* panel) {
  for (int t = 0; t < n; ++t) {
    for (int64_t u = 0; u < units_of(k); ++u) {
      const int64_t from = u * kUnit, count = std::min<int64_t>(k - from, kUnit);
      float x[kUnit];
      for (int64_t i = 0; i < count; ++i)
        x[i] = load<DataType::kFloat32>(tokens[t], from + i) * (weights == nullptr ? 1.0f : weights[t]);
      write_unit(x, count, Panel(panel, k, n), u, t, n);
    }
  }
}

void pack_rows(const float* values, int count, int n, int64_t from, int64_t k, void* panel) {
  for (int i = 0; i < count; i += kUnit) {
    for (int t = 0; t < n; ++t) {
      float x[kUnit];
      for (int j = 0; j < kUnit && i + j < count; ++j) x[j] = values[(i + j) * n + t];
      write_unit(x, count - i, Panel(panel, k, n), (from + i) / kUnit, t, n);
    }
  }
}

template <WeightFormat format>
void unpack(const void* const* rows, int n, int64_t, int64_t k, bool, void* bytes, int64_t stride) {
  for (int r = 0; r < n; ++r) {
    char* to = static_cast<char*>(bytes) + r * stride;
    for (int64_t i = 0; i < k; ++i) to[i] = static_cast<char>(code_of<format>(static_cast<const uint8_t*>(rows[r]), i));
    std::memset(to + k, 0, static_cast<size_t>(stride - k));
  }
}

template <WeightFormat format>
float dot(const TileRows& rows, int64_t r, const Panel& panel, int t, int n, int64_t k) {
  // Of the bytes that `unpack` made, too.
  constexpr WeightFormat bytes = format == WeightFormat::kInt8 ? format : WeightFormat::kUint8;
  constexpr float middle = format == WeightFormat::kInt4 ? 8.0f : format == WeightFormat::kMxfp4 ? 12.0f : 128.0f;
  const auto* codes = static_cast<const uint8_t*>(rows.first) + r * rows.stride;
  float acc = 0.0f;
  for (int64_t u = 0; u < units_of(k); ++u) {
    int dp = 0;
    for (int64_t i = u * kUnit; i < (u + 1) * kUnit && i < k; ++i)
      dp += code_of<bytes>(codes, i) * static_cast<int8_t>(panel.codes[(i / 4 * n + t) * 4 + i % 4]);
    const int64_t factor = r * units_of(k) + u;
    const float zero_point = rows.zero_points == nullptr ? middle : rows.zero_points[factor];
    acc = std::fma(std::fma(-zero_point, panel.sums[u * n + t], static_cast<float>(dp)),
                   rows.scales[factor] * panel.scales[u * n + t], acc);
  }
  return acc;
}

template <WeightFormat format>
void multiply(const TileRows* parts, const void* const* panels, int n_tokens, int64_t k, float* out) {
  for (int first = 0; first < n_tokens; first += kPanelTokens) {
    const int n = std::min(n_tokens - first, kPanelTokens);
    const Panel panel(panels[first / kPanelTokens], k, n);
    for (int p = 0; p < 2; ++p)
      for (int64_t r = 0; r < parts[p].n; ++r)
        for (int t = 0; t < n; ++t) *out++ = dot<format>(parts[p], r, panel, t, n, k);
  }
}

template <WeightFormat format>
constexpr TileKernel entry(const char* name) {
  constexpr bool nibbles = format == WeightFormat::kInt4 || format == WeightFormat::kMxfp4;
  return {name,
          Isa::kPortable,
          format,
          0,
          1,
          panel_bytes,
          pack,
          pack_rows,
          nibbles ? unpack<format> : nullptr,
          multiply<format>};
}

}  // namespace

const TileKernel kTileInt8Portable[kQuantisedFormats] = {
    entry<WeightFormat::kUint8>("tile_uint8_portable"),
    entry<WeightFormat::kInt8>("tile_int8_portable"),
    entry<WeightFormat::kInt4>("tile_int4_portable"),
    entry<WeightFormat::kMxfp4>("tile_mxfp4_portable"),
};

}  // namespace hina
