// Every kernel of every table that this CPU can run, on odd sizes, at odd addresses, against guard pages, compared with
// double arithmetic under derived bounds and with itself for batch invariance.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/convert/scalar.h"
#include "kernels/dispatch.h"
#include "runtime/isa.h"

using namespace hina;

namespace {

constexpr double kUnit = 0x1p-24;  // unit roundoff of float32

std::mt19937 g_random(7);

float normal() { return std::normal_distribution<float>()(g_random); }

bool runs_here(Isa isa) { return isa <= cpu_features().newest; }

// Bytes of `n` values.
size_t bytes_of(DataType type, int64_t n) {
  if (type == DataType::kUint4) return static_cast<size_t>((n + 1) / 2);
  if (type >= DataType::kUint8) return static_cast<size_t>(n);
  return static_cast<size_t>(n * (type == DataType::kFloat32 ? 4 : 2));
}

float load_any(DataType type, const void* base, int64_t i) {
  switch (type) {
    case DataType::kFloat32:
      return load<DataType::kFloat32>(base, i);
    case DataType::kFloat16:
      return load<DataType::kFloat16>(base, i);
    case DataType::kBFloat16:
      return load<DataType::kBFloat16>(base, i);
    case DataType::kUint8:
      return load<DataType::kUint8>(base, i);
    case DataType::kInt8:
      return load<DataType::kInt8>(base, i);
    case DataType::kUint4:
      return load<DataType::kUint4>(base, i);
    case DataType::kE8M0:
      return load<DataType::kE8M0>(base, i);
  }
  return 0;
}

void store_any(DataType type, void* base, int64_t i, float value) {
  if (type == DataType::kFloat32) return store<DataType::kFloat32>(base, i, value);
  return type == DataType::kFloat16 ? store<DataType::kFloat16>(base, i, value)
                                    : store<DataType::kBFloat16>(base, i, value);
}

bool same_bits(float a, float b) { return std::memcmp(&a, &b, 4) == 0; }

bool same_value(float a, float b) { return std::isnan(a) ? std::isnan(b) : same_bits(a, b); }

// --- dot ---

// Vectors of `k` values of a type that lie `gap` elements apart with NaN between them; the last ends at a guard page.
struct Vectors {
  Guarded memory;
  std::vector<const void*> at;

  Vectors(DataType type, int n, int64_t k, int64_t gap) : memory(n > 0 ? bytes_of(type, (k + gap) * n - gap) : 0) {
    for (int v = 0; v < n; ++v) {
      char* values = memory.data() + static_cast<size_t>(v) * bytes_of(type, k + gap);
      at.push_back(values);
      for (int64_t i = 0; i < k; ++i) store_any(type, values, i, normal());
    }
  }
};

struct Sum {
  double value, bound;
};

// The exact sum of row[i] * token[i], and how far float32 may be from it.
//
// Of float32 tokens: a product is rounded at most once, each addition once, and the longest path has k / 8 additions in
// a lane of eight (fewer in one of sixteen) and three to add up the lanes (four); the rest is second order.
//
// Of bfloat16 tokens: products of two 8-bit significands are exact. An instruction adds two of them to each of sixteen
// lanes, with a rounding each, which makes k / 16 in a lane, and four additions for the lanes. It takes subnormal
// values for zero, which costs less than 2^-126 times the other factor, and makes zeros of subnormal products and sums,
// less than 2^-126 each.
Sum exact_sum(const DotKernel& kernel, const void* row, const void* token, int64_t k) {
  const bool flushes = kernel.token_type == DataType::kBFloat16;
  Sum sum{0, 0};
  double size = 0, flushed = 0;
  for (int64_t i = 0; i < k; ++i) {
    const double w = load_any(kernel.weight_type, row, i), x = load_any(kernel.token_type, token, i);
    sum.value += w * x;
    size += std::fabs(w * x);
    if (flushes) flushed += 0x1p-126 * (std::fabs(w) + std::fabs(x) + 2);
  }
  sum.bound = (std::ceil(static_cast<double>(k) / (flushes ? 16 : 8)) + 6) * kUnit * size + flushed;
  return sum;
}

void test_dot(const DotKernel& kernel, int n_rows, int n_tokens, int64_t k, int64_t gap) {
  const Vectors rows(kernel.weight_type, n_rows, k, gap), tokens(kernel.token_type, n_tokens, k, gap);
  const int64_t stride = n_rows + 3;
  std::vector<float> out(static_cast<size_t>(stride * n_tokens + 1), -77.0f);
  kernel.fn(rows.at.data(), n_rows, tokens.at.data(), n_tokens, k, out.data(), stride);
  CHECK(out.back() == -77.0f, "%s wrote behind its results", kernel.name);
  for (int t = 0; t < n_tokens; ++t) {
    for (int64_t r = 0; r < stride; ++r) {
      const float got = out[static_cast<size_t>(t * stride + r)];
      if (r >= n_rows) {
        CHECK(got == -77.0f, "%s wrote beside its results", kernel.name);
        continue;
      }
      const Sum want = exact_sum(kernel, rows.at[r], tokens.at[t], k);
      CHECK(std::fabs(got - want.value) <= want.bound, "%s k=%ld row %ld token %d: %g, expected %g", kernel.name,
            (long)k, (long)r, t, got, want.value);
      float alone = 0;
      kernel.fn(&rows.at[r], 1, &tokens.at[t], 1, k, &alone, 1);
      CHECK(same_bits(alone, got), "%s k=%ld rows %d tokens %d: a result depends on its batch", kernel.name, (long)k,
            n_rows, n_tokens);
    }
  }
}

void test_dots() {
  for (const DotKernel& kernel : dot_kernels()) {
    if (!runs_here(kernel.isa)) continue;
    for (const int64_t k : {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 60, 96, 544})
      for (const int rows : {0, 1, 2, 3, 4, 5, 8, 9, 31})
        for (const int tokens : {0, 1, 2, 3, 4, 5, 7})
          for (const int64_t gap : {0, 3}) test_dot(kernel, rows, tokens, k, gap);
    // Beyond the blocks of k and the bunches of tokens that kernels make.
    for (const int64_t k : {256, 257, 768, 769, 1541})
      for (const int rows : {13, 32})
        for (const int tokens : {3, 16, 17, 49}) test_dot(kernel, rows, tokens, k, 1);
    test_dot(kernel, 9, 97, 100, 0);
    std::printf("ok %s\n", kernel.name);
  }
}

// Rows and tokens at every byte address, as a model file may place rows.
void test_dot_addresses() {
  for (const DotKernel& kernel : dot_kernels()) {
    if (!runs_here(kernel.isa)) continue;
    constexpr int64_t k = 43;
    std::vector<float> values(k), x(k);
    for (int64_t i = 0; i < k; ++i) values[i] = normal(), x[i] = normal();
    float first = 0;
    for (int shift = 0; shift < 65; ++shift) {
      std::vector<char> row_bytes(k * 4 + 65), token_bytes(k * 4 + 65);
      const void* row = row_bytes.data() + shift;
      const void* token = token_bytes.data() + (shift * 4) % 64;
      for (int64_t i = 0; i < k; ++i) {
        store_any(kernel.weight_type, row_bytes.data() + shift, i, values[i]);
        store_any(kernel.token_type, token_bytes.data() + (shift * 4) % 64, i, x[i]);
      }
      float out = 0;
      kernel.fn(&row, 1, &token, 1, k, &out, 1);
      if (shift == 0) first = out;
      CHECK(same_bits(out, first), "%s at address offset %d", kernel.name, shift);
    }
  }
}

// NaN and infinity reach the results of their row, wherever they stand, and no other; subnormal values stay in bounds.
void test_dot_special_values() {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr int kRows = 8, kTokens = 3;
  for (const DotKernel& kernel : dot_kernels()) {
    if (!runs_here(kernel.isa)) continue;
    for (const int64_t k : {9, 64, 77}) {
      const Vectors rows(kernel.weight_type, kRows, k, 0), tokens(kernel.token_type, kTokens, k, 0);
      const auto set = [](DataType type, const void* values, int64_t i, float value) {
        store_any(type, const_cast<void*>(values), i, value);
      };
      set(kernel.weight_type, rows.at[1], k - 1, kNan);
      set(kernel.weight_type, rows.at[2], 0, kInf);
      set(kernel.weight_type, rows.at[3], k / 2, 0x1.4p-130f);  // subnormal in bfloat16 too, zero in float16
      set(kernel.weight_type, rows.at[4], k / 2, 0x1.8p-24f);   // subnormal in float16
      for (const void* token : tokens.at) set(kernel.token_type, token, 0, 1.0f);
      set(kernel.token_type, tokens.at[0], k / 2, 0x1p120f);
      set(kernel.token_type, tokens.at[1], k / 2, -0x1p-133f);  // the least of bfloat16
      std::vector<float> out(kRows * kTokens);
      kernel.fn(rows.at.data(), kRows, tokens.at.data(), kTokens, k, out.data(), kRows);
      for (int t = 0; t < kTokens; ++t) {
        for (int r = 0; r < kRows; ++r) {
          const float got = out[static_cast<size_t>(t * kRows + r)];
          const Sum want = exact_sum(kernel, rows.at[r], tokens.at[t], k);
          if (r == 1)
            CHECK(std::isnan(got), "%s lost a NaN", kernel.name);
          else if (r == 2)
            CHECK(got == kInf, "%s lost an infinity: %g", kernel.name, got);
          else
            CHECK(std::fabs(got - want.value) <= want.bound, "%s: %g, expected %g", kernel.name, got, want.value);
        }
      }
    }
  }
}

// --- convert ---

// Every value of a narrow type, and odd numbers of them at odd addresses.
void test_widen(const ConvertKernel& kernel, const std::vector<float>& floats) {
  const bool is_code = kernel.type >= DataType::kUint8;
  for (const int64_t n : {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 513, 65536}) {
    for (const size_t shift : {0, 1}) {
      const size_t bytes = bytes_of(kernel.type, n);
      Guarded source(bytes + shift), target(static_cast<size_t>(n) * 4);
      char* from = source.data();
      for (size_t i = 0; i < bytes; ++i) from[i] = static_cast<char>(is_code ? i : i * 257 >> (i % 2 * 8));
      if (kernel.type == DataType::kFloat32)
        for (int64_t i = 0; i < n; ++i)
          store<DataType::kFloat32>(from, i, floats[static_cast<size_t>(i) % floats.size()]);
      if (kernel.type == DataType::kFloat16 || kernel.type == DataType::kBFloat16)  // n = 65536: all of them
        for (int64_t i = 0; i < n; ++i) {
          const uint16_t bits = static_cast<uint16_t>(i * 257);
          std::memcpy(from + i * 2, &bits, 2);
        }
      float* wide = reinterpret_cast<float*>(target.data());
      kernel.widen(from, wide, n);
      for (int64_t i = 0; i < n; ++i)
        CHECK(same_value(wide[i], load_any(kernel.type, from, i)), "%s widen of %ld values", kernel.name, (long)n);
      CHECK(target.margin_intact(), "%s wrote before its target", kernel.name);
      if (kernel.narrow == nullptr) continue;
      Guarded back(bytes);
      kernel.narrow(wide, back.data(), n);
      const size_t size = bytes_of(kernel.type, 1);
      for (size_t i = 0; i < static_cast<size_t>(n); ++i)
        CHECK(std::isnan(wide[i]) || std::memcmp(from + i * size, back.data() + i * size, size) == 0, "%s round trip",
              kernel.name);
      CHECK(back.margin_intact(), "%s wrote before its target", kernel.name);
    }
  }
}

void test_convert() {
  std::vector<float> floats = {0.0f,
                               -0.0f,
                               1.0f,
                               65504.0f,
                               65519.0f,
                               65520.0f,
                               -65536.0f,
                               0x1p-24f,
                               0x1p-25f,
                               0x1.8p-25f,
                               0x1p-14f,
                               0x1.ffcp-15f,
                               3.4e38f,
                               std::numeric_limits<float>::denorm_min(),
                               std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN()};
  for (int i = 0; i < 20000; ++i) {
    uint32_t bits = g_random();
    float value;
    std::memcpy(&value, &bits, 4);
    floats.push_back(value);
  }
  for (const ConvertKernel& kernel : convert_kernels()) {
    if (!runs_here(kernel.isa)) continue;
    test_widen(kernel, floats);
    CHECK((kernel.narrow != nullptr) == (static_cast<int>(kernel.type) < kFloatTypeCount), "%s narrow", kernel.name);
    if (kernel.narrow != nullptr) {
      const int64_t n = static_cast<int64_t>(floats.size());
      std::vector<char> narrow(bytes_of(kernel.type, n)), want(bytes_of(kernel.type, n));
      kernel.narrow(floats.data(), narrow.data(), n);
      for (int64_t i = 0; i < n; ++i) {
        store_any(kernel.type, want.data(), i, floats[static_cast<size_t>(i)]);
        CHECK(same_value(load_any(kernel.type, narrow.data(), i), load_any(kernel.type, want.data(), i)), "%s of %a",
              kernel.name, floats[i]);
      }
    }
    std::printf("ok %s\n", kernel.name);
  }
  // What the others are compared with, against its definition.
  for (int e = 0; e < 255; ++e)
    CHECK(float_of_e8m0(static_cast<uint8_t>(e)) == std::ldexp(1.0f, e - 127), "E8M0 %d", e);
  CHECK(std::isnan(float_of_e8m0(255)), "E8M0 255");
}

// --- dequantise ---

// A code of a row, by the definition of its format.
float code_by_definition(WeightFormat format, const unsigned char* row, int64_t i) {
  constexpr float kE2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const int nibble = i % 2 == 0 ? row[i / 2] % 16 : row[i / 2] / 16;
  switch (format) {
    case WeightFormat::kUint8:
      return row[i];
    case WeightFormat::kInt8:
      return static_cast<float>(row[i] < 128 ? row[i] : row[i] - 256) + 128;
    case WeightFormat::kInt4:
      return static_cast<float>(nibble);
    case WeightFormat::kMxfp4:
      return 2 * (nibble < 8 ? kE2m1[nibble] : -kE2m1[nibble - 8]) + 12;
    case WeightFormat::kFloat:
      break;
  }
  return 0;
}

// Codes, scales, zero points and results all end at guard pages. The results are specified to the bit.
void test_dequantise(const DequantiseKernel& kernel, int64_t k, int unit) {
  const bool four_bits = kernel.format == WeightFormat::kInt4 || kernel.format == WeightFormat::kMxfp4;
  const size_t units = static_cast<size_t>((k + unit - 1) / unit), size = static_cast<size_t>(k);
  Guarded values(four_bits ? (size + 1) / 2 : size), scales(units * 4), zero_points(units * 4), out(size * 4);
  auto* row = reinterpret_cast<unsigned char*>(values.data());
  auto* scale = reinterpret_cast<float*>(scales.data());
  auto* zero_point = reinterpret_cast<float*>(zero_points.data());
  auto* got = reinterpret_cast<float*>(out.data());
  for (size_t i = 0; i < (four_bits ? (size + 1) / 2 : size); ++i) row[i] = static_cast<unsigned char>(g_random());
  for (size_t u = 0; u < units; ++u) {
    scale[u] = normal() * 0.1f;
    zero_point[u] = u % 3 == 0 ? 7.3f + normal() : static_cast<float>(g_random() % (four_bits ? 16 : 256));
  }
  if (units > 2) scale[1] = std::numeric_limits<float>::quiet_NaN(), scale[2] = 0x1p-140f;
  kernel.fn(row, k, unit, scale, zero_point, got);
  for (int64_t i = 0; i < k; ++i) {
    const float difference = code_by_definition(kernel.format, row, i) - zero_point[i / unit];
    CHECK(same_value(got[i], difference * scale[i / unit]), "%s k=%ld unit=%d value %ld: %g, expected %g", kernel.name,
          (long)k, unit, (long)i, got[i], difference * scale[i / unit]);
  }
  CHECK(out.margin_intact(), "%s wrote before its target", kernel.name);
}

void test_dequantises() {
  for (const DequantiseKernel& kernel : dequantise_kernels()) {
    if (!runs_here(kernel.isa)) continue;
    for (const int unit : {16, 32}) {
      for (int64_t k = 1; k <= 100; ++k) test_dequantise(kernel, k, unit);
      for (const int64_t k : {544, 1001, 4096}) test_dequantise(kernel, k, unit);
    }
    std::printf("ok %s\n", kernel.name);
  }
}

// --- activation ---

double exact(Activation activation, double g, double alpha) {
  switch (activation) {
    case Activation::kSilu:
      return g / (1 + std::exp(-alpha * g));
    case Activation::kGelu:
      return 0.5 * g * (1 + std::erf(g * M_SQRT1_2));
    case Activation::kGeluTanh:
      return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
    case Activation::kRelu:
      return g < 0 ? 0 : g;
    case Activation::kRelu2:
      return g < 0 ? 0 : g * g;
    case Activation::kIdentity:
      return g;
  }
  return 0;
}

// Few values: partial vectors, against guard pages.
void test_short_activation(const ActivationKernel& kernel) {
  const ActivationParams params{1.702f, 1.0f, 7.0f};
  for (int64_t n = 0; n < 35; ++n) {
    const size_t bytes = static_cast<size_t>(n) * 4;
    Guarded gate(bytes), up(bytes), out(bytes), plain(bytes);
    float* g = reinterpret_cast<float*>(gate.data());
    float* u = reinterpret_cast<float*>(up.data());
    for (int64_t i = 0; i < n; ++i) g[i] = normal() * 4.0f, u[i] = normal() * 4.0f;
    kernel.fn(params, g, u, reinterpret_cast<float*>(out.data()), n);
    kernel.fn(params, g, nullptr, reinterpret_cast<float*>(plain.data()), n);
    for (int64_t i = 0; i < n; ++i) {
      float gated = 0, alone = 0;
      kernel.fn(params, g + i, u + i, &gated, 1);
      kernel.fn(params, g + i, nullptr, &alone, 1);
      CHECK(same_bits(gated, load<DataType::kFloat32>(out.data(), i)), "%s depends on n=%ld", kernel.name, (long)n);
      CHECK(same_bits(alone, load<DataType::kFloat32>(plain.data(), i)), "%s depends on n=%ld", kernel.name, (long)n);
    }
    CHECK(out.margin_intact() && plain.margin_intact(), "%s wrote before its target", kernel.name);
  }
}

void test_activation() {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr int64_t n = 1003;
  for (const ActivationKernel& kernel : activation_kernels()) {
    if (!runs_here(kernel.isa)) continue;
    for (const ActivationParams params : {ActivationParams{1.0f, 0.0f, kInf}, ActivationParams{1.702f, 1.0f, 7.0f}}) {
      Guarded gate(n * 4), up(n * 4), out(n * 4);
      float* g = reinterpret_cast<float*>(gate.data());
      float* u = reinterpret_cast<float*>(up.data());
      float* y = reinterpret_cast<float*>(out.data());
      for (int64_t i = 0; i < n; ++i) g[i] = normal() * (i % 3 == 0 ? 20.0f : 2.0f), u[i] = normal() * 4.0f;
      g[5] = kNan, g[6] = kInf, u[9] = kNan;
      kernel.fn(params, g, u, y, n);
      for (int64_t i = 0; i < n; ++i) {
        const double clipped = g[i] > params.limit ? params.limit : g[i];
        const double factor =
            std::isnan(u[i]) ? u[i] : std::fmin(std::fmax(u[i], -params.limit), params.limit) + params.beta;
        const double want = exact(kernel.activation, clipped, params.alpha) * factor;
        if (std::isnan(want) || std::isinf(want)) {
          CHECK(std::isnan(want) ? std::isnan(y[i]) : y[i] == want, "%s(%g) = %g", kernel.name, g[i], y[i]);
          continue;
        }
        // The exponent -alpha * g is rounded, which exp turns into a relative error of |alpha g| units; about ten more
        // roundings follow. erf and tanh cancel against 1: there the bound is relative to |g|, not to the result. Where
        // exp overflows, a sigmoid below 2^-128 counts as zero.
        const bool cancels = kernel.activation == Activation::kGelu || kernel.activation == Activation::kGeluTanh;
        const double inner = kernel.activation == Activation::kGeluTanh ? 2 * (clipped + 0.0447 * std::pow(clipped, 3))
                                                                        : params.alpha * clipped;
        const double bound = kUnit * (10 + 4 * std::fabs(inner)) * std::fabs(want) +
                             (cancels ? 12 * kUnit * std::fabs(clipped * factor) : 0) +
                             0x1p-127 * (1 + std::fabs(clipped * factor));
        CHECK(std::fabs(y[i] - want) <= bound, "%s(%g, %g) = %g, expected %g", kernel.name, g[i], u[i], y[i], want);
        float alone = 0;
        kernel.fn(params, g + i, u + i, &alone, 1);
        CHECK(same_bits(alone, y[i]), "%s depends on the place", kernel.name);
      }
      float copy = g[0];
      kernel.fn(params, &copy, nullptr, &copy, 1);  // plain, in place
      const double want = exact(kernel.activation, g[0], params.alpha);
      CHECK(std::fabs(copy - want) <= kUnit * (10 + 80) * std::fabs(g[0] * g[0]) + 0x1p-127 * (1 + std::fabs(g[0])),
            "%s plain", kernel.name);
    }
    test_short_activation(kernel);
    std::printf("ok %s\n", kernel.name);
  }
}

}  // namespace

int main() {
  test_dots();
  test_dot_addresses();
  test_dot_special_values();
  test_convert();
  test_dequantises();
  test_activation();
  std::printf("kernels: passed\n");
}
