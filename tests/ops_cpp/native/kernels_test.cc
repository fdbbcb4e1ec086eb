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

bool runs_here(Isa isa) { return isa == Isa::kPortable || cpu_features().avx2_fma_f16c; }

int64_t size_of(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

float load_any(DataType type, const void* base, int64_t i) {
  if (type == DataType::kFloat32) return load<DataType::kFloat32>(base, i);
  return type == DataType::kFloat16 ? load<DataType::kFloat16>(base, i) : load<DataType::kBFloat16>(base, i);
}

void store_any(DataType type, void* base, int64_t i, float value) {
  if (type == DataType::kFloat32) return store<DataType::kFloat32>(base, i, value);
  return type == DataType::kFloat16 ? store<DataType::kFloat16>(base, i, value)
                                    : store<DataType::kBFloat16>(base, i, value);
}

bool same_bits(float a, float b) { return std::memcmp(&a, &b, 4) == 0; }

void test_dot(const DotKernel& kernel, int n_rows, int n_tokens, int64_t k, int64_t gap) {
  // Rows and tokens lie `gap` elements apart with NaN between them; the last ends at the guard page.
  const int64_t row_bytes = (k + gap) * size_of(kernel.weight_type);
  Guarded weights(n_rows > 0 ? static_cast<size_t>(row_bytes * n_rows - gap * size_of(kernel.weight_type)) : 0);
  Guarded x(n_tokens > 0 ? static_cast<size_t>((k + gap) * n_tokens - gap) * 4 : 0);
  std::vector<const void*> rows;
  std::vector<const float*> tokens;
  for (int r = 0; r < n_rows; ++r) {
    char* row = weights.data() + r * row_bytes;
    rows.push_back(row);
    for (int64_t i = 0; i < k; ++i) store_any(kernel.weight_type, row, i, normal());
  }
  for (int t = 0; t < n_tokens; ++t) {
    float* token = reinterpret_cast<float*>(x.data()) + t * (k + gap);
    tokens.push_back(token);
    for (int64_t i = 0; i < k; ++i) token[i] = normal();
  }
  const int64_t stride = n_rows + 3;
  std::vector<float> out(static_cast<size_t>(stride * n_tokens + 1), -77.0f);
  kernel.fn(rows.data(), n_rows, tokens.data(), n_tokens, k, out.data(), stride);
  for (int t = 0; t < n_tokens; ++t) {
    for (int64_t r = 0; r < stride; ++r) {
      const float got = out[static_cast<size_t>(t * stride + r)];
      if (r >= n_rows) {
        CHECK(got == -77.0f, "%s wrote beside its results", kernel.name);
        continue;
      }
      double want = 0, size = 0;
      for (int64_t i = 0; i < k; ++i) {
        const double product = static_cast<double>(load_any(kernel.weight_type, rows[r], i)) * tokens[t][i];
        want += product;
        size += std::fabs(product);
      }
      // One rounding for the product and one for each addition on the longest path: k / 8 steps of a lane, 3 to fold.
      const double bound = (std::ceil(k / 8.0) + 5) * kUnit * size;
      CHECK(std::fabs(got - want) <= bound, "%s k=%ld row %ld token %d: %g, expected %g", kernel.name, (long)k, (long)r,
            t, got, want);
      float alone = 0;
      kernel.fn(&rows[r], 1, &tokens[t], 1, k, &alone, 1);
      CHECK(same_bits(alone, got), "%s k=%ld: a result depends on its batch", kernel.name, (long)k);
    }
  }
}

void test_dots() {
  for (const DotKernel& kernel : dot_kernels()) {
    if (!runs_here(kernel.isa)) continue;
    for (const int64_t k : {1, 2, 7, 8, 9, 15, 33, 60, 96, 544})
      for (const int rows : {0, 1, 2, 3, 4, 5, 8, 9, 31})
        for (const int tokens : {0, 1, 2, 3, 4, 5, 7})
          for (const int64_t gap : {0, 3}) test_dot(kernel, rows, tokens, k, gap);
    std::printf("ok %s\n", kernel.name);
  }
}

// Rows at every byte address, as a model file may place them.
void test_dot_addresses() {
  for (const DotKernel& kernel : dot_kernels()) {
    if (!runs_here(kernel.isa)) continue;
    constexpr int64_t k = 21;
    std::vector<float> values(k), x(k);
    for (int64_t i = 0; i < k; ++i) values[i] = normal(), x[i] = normal();
    float first = 0;
    for (int shift = 0; shift < 33; ++shift) {
      std::vector<char> bytes(k * 4 + 33);
      for (int64_t i = 0; i < k; ++i) store_any(kernel.weight_type, bytes.data() + shift, i, values[i]);
      const void* row = bytes.data() + shift;
      const float* token = x.data();
      float out = 0;
      kernel.fn(&row, 1, &token, 1, k, &out, 1);
      if (shift == 0) first = out;
      CHECK(same_bits(out, first), "%s at address offset %d", kernel.name, shift);
    }
  }
}

bool same_value(float a, float b) { return std::isnan(a) ? std::isnan(b) : same_bits(a, b); }

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
    const int64_t size = size_of(kernel.type);
    for (int64_t n : {0, 1, 7, 8, 9, 65536}) {
      Guarded source(static_cast<size_t>(n * size)), target(static_cast<size_t>(n) * 4),
          back(static_cast<size_t>(n * size));
      for (int64_t i = 0; i < n; ++i) {
        const uint16_t bits = static_cast<uint16_t>(i * 257);  // n = 65536: every 16-bit pattern
        if (size == 2)
          std::memcpy(source.data() + i * 2, &bits, 2);
        else
          store<DataType::kFloat32>(source.data(), i, floats[static_cast<size_t>(i) % floats.size()]);
      }
      float* wide = reinterpret_cast<float*>(target.data());
      kernel.widen(source.data(), wide, n);
      kernel.narrow(wide, back.data(), n);
      for (int64_t i = 0; i < n; ++i) {
        CHECK(same_value(wide[i], load_any(kernel.type, source.data(), i)), "%s widen", kernel.name);
        CHECK(std::isnan(wide[i]) || std::memcmp(source.data() + i * size, back.data() + i * size, size) == 0,
              "%s round trip", kernel.name);
      }
      CHECK(target.margin_intact() && back.margin_intact(), "%s wrote before its target", kernel.name);
    }
    const int64_t n = static_cast<int64_t>(floats.size());
    std::vector<char> narrow(static_cast<size_t>(n * size)), want(static_cast<size_t>(n * size));
    kernel.narrow(floats.data(), narrow.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      store_any(kernel.type, want.data(), i, floats[static_cast<size_t>(i)]);
      CHECK(same_value(load_any(kernel.type, narrow.data(), i), load_any(kernel.type, want.data(), i)), "%s of %a",
            kernel.name, floats[i]);
    }
    std::printf("ok %s\n", kernel.name);
  }
}

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
    std::printf("ok %s\n", kernel.name);
  }
}

}  // namespace

int main() {
  test_dots();
  test_dot_addresses();
  test_convert();
  test_activation();
  std::printf("kernels: passed\n");
}
