// qdot, portable C++: the reference of the family. Tokens: scales [units], sums [units], codes [units * unit], as they
// come. A panel is the rows' codes as bytes, with their scales and zero points; `few` makes one on the stack, unit by
// unit.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/qdot/codes.h"
#include "kernels/tables.h"

namespace hina {
namespace {

int64_t units_of(int64_t k, int unit) { return (k + unit - 1) / unit; }
int64_t round64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

struct Token {
  float* scales;
  float* sums;
  int8_t* codes;

  Token(const void* token, int64_t k, int unit) {
    scales = static_cast<float*>(const_cast<void*>(token));
    sums = scales + units_of(k, unit);
    codes = reinterpret_cast<int8_t*>(sums + units_of(k, unit));
  }
};

int64_t token_bytes(int64_t k, int unit) { return round64(units_of(k, unit) * (8 + unit)); }

void quantise(const float* x, int64_t from, int64_t to, int64_t k, int unit, void* token) {
  const Token out(token, k, unit);
  for (int64_t begin = from; begin < to; begin += unit) {
    const TokenUnit unit_of_x =
        quantise_unit(x + (begin - from), static_cast<int>(std::min<int64_t>(to - begin, unit)));
    const int64_t u = begin / unit;
    std::memcpy(out.codes + u * unit, unit_of_x.codes, static_cast<size_t>(unit));
    out.scales[u] = unit_of_x.scale;
    out.sums[u] = unit_of_x.sum;
  }
}

template <WeightFormat format>
void dot_row(const uint8_t* codes, const float* scales, const float* zero_points, int unit, int64_t k,
             const void* const* tokens, int n_tokens, float* out, int64_t out_stride) {
  for (int t = 0; t < n_tokens; ++t) {
    const Token token(tokens[t], k, unit);
    float acc = 0.0f;
    for (int64_t u = 0; u < units_of(k, unit); ++u) {
      int dp = 0;
      for (int64_t i = u * unit; i < (u + 1) * unit && i < k; ++i) dp += code_of<format>(codes, i) * token.codes[i];
      acc =
          std::fma(std::fma(-zero_points[u], token.sums[u], static_cast<float>(dp)), scales[u] * token.scales[u], acc);
    }
    out[t * out_stride] = acc;
  }
}

template <WeightFormat format>
void few(const QRows& rows, const void* const* tokens, int n_tokens, int64_t k, float* out, int64_t out_stride) {
  for (int r = 0; r < rows.n; ++r)
    dot_row<format>(static_cast<const uint8_t*>(rows.values[r]), rows.scales[r], rows.zero_points[r], kUnit, k, tokens,
                    n_tokens, out + r, out_stride);
}

// Of one row in a panel: scales [units], zero points [units], codes [k].
int64_t panel_row(int64_t k, int unit) { return round64(units_of(k, unit) * 8 + k); }

int64_t panel_bytes(int64_t k, int unit) { return kMaxQRows * panel_row(k, unit); }

template <WeightFormat format>
void pack(const QRows& rows, int64_t k, void* panel) {
  const int64_t units = units_of(k, rows.unit);
  for (int r = 0; r < rows.n; ++r) {
    char* to = static_cast<char*>(panel) + r * panel_row(k, rows.unit);
    std::memcpy(to, rows.scales[r], static_cast<size_t>(units) * 4);
    std::memcpy(to + units * 4, rows.zero_points[r], static_cast<size_t>(units) * 4);
    for (int64_t i = 0; i < k; ++i)
      to[units * 8 + i] = static_cast<char>(code_of<format>(static_cast<const uint8_t*>(rows.values[r]), i));
  }
}

void many(const void* panel, int n_rows, int unit, const void* const* tokens, int n_tokens, int64_t k, float* out,
          int64_t out_stride) {
  const int64_t units = units_of(k, unit);
  for (int r = 0; r < n_rows; ++r) {
    const char* row = static_cast<const char*>(panel) + r * panel_row(k, unit);
    const float* scales = reinterpret_cast<const float*>(row);
    dot_row<WeightFormat::kUint8>(reinterpret_cast<const uint8_t*>(row + units * 8), scales, scales + units, unit, k,
                                  tokens, n_tokens, out + r, out_stride);
  }
}

template <WeightFormat format>
constexpr QDotKernel entry(const char* name) {
  return {name, Isa::kPortable, format, 16, 1, token_bytes, quantise, few<format>, panel_bytes, pack<format>, many};
}

}  // namespace

const QDotKernel kQDotPortable[kQuantisedFormats] = {
    entry<WeightFormat::kUint8>("qdot_uint8_portable"),
    entry<WeightFormat::kInt8>("qdot_int8_portable"),
    entry<WeightFormat::kInt4>("qdot_int4_portable"),
    entry<WeightFormat::kMxfp4>("qdot_mxfp4_portable"),
};

}  // namespace hina
