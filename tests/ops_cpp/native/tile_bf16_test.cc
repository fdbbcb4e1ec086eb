// Family tile_bf16: the portable entries are within a derived bound of double arithmetic, and every entry that this
// machine can run, or is emulated to, gives their bits. Whatever a kernel touches ends at a guard page, and what lies
// beside it is NaN.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/peak/peak.h"
#include "tile_check.h"

using namespace hina;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

enum class Data { kUsual, kSpecial };

float value(Data data) {
  constexpr float special[] = {kNan,   kInf,    -kInf,     0.0f,     -0.0f,    3.4e38f, -3.38e38f, 1e-45f,
                               2e-39f, -1e-38f, 0x1p-126f, 0x1p-70f, 0x1p-60f, 1e20f,   -1e30f,    0x1p-133f};
  return data == Data::kSpecial && below(40) == 0 ? special[below(16)] : normal();
}

// Rows of both parts: the last of each ends at a guard page, and there is NaN between them.
struct Rows {
  Rows(int n0, int n1, int64_t k, int64_t gap, Data data) {
    const int n[2] = {n0, n1};
    for (int part = 0; part < 2; ++part) {
      const int64_t stride = k * 2 + gap;
      memory[part] = guarded(n[part] == 0 ? 0 : (n[part] - 1) * stride + k * 2);
      char* first = memory[part]->data();
      for (int r = 0; r < n[part]; ++r)
        for (int64_t i = 0; i < k; ++i) store<DataType::kBFloat16>(first + r * stride, i, value(data));
      all[part].first = first, all[part].stride = stride, all[part].n = n[part];
    }
  }
  int n() const { return all[0].n + all[1].n; }
  const char* row(int r) const {
    const TileRows& part = all[r >= all[0].n];
    return static_cast<const char*>(part.first) + (r - (r < all[0].n ? 0 : all[0].n)) * part.stride;
  }

  TileRows all[2];
  std::unique_ptr<Guarded> memory[2];
};

// `x` rounded to 8 significant bits, ties to even; what float32 could not hold is infinity.
double bfloat(double x) {
  int exponent = 0;
  const double fraction = std::frexp(x, &exponent), rounded = std::ldexp(std::rint(fraction * 256), exponent - 8);
  return std::fabs(rounded) < 0x1p128 ? rounded : std::copysign(HUGE_VAL, rounded);
}

// The exact sum, and how far float32 may be from it. Of a step, a product meets at most 16 additions of its parity,
// that of the two, and those of the steps from its own on, each with one rounding; the rest is second order. Subnormal
// values taken for zero cost less than 2^-126 times the other factor, and sums made zero less than 2^-126 each.
void check_exact(const TileKernel& kernel, const Rows& rows, const Tokens& tokens, int n, int64_t k, bool weighted,
                 const std::vector<float>& got) {
  const double roundings = 17 + std::ceil(static_cast<double>(k) / 32) * kernel.terms + 1;
  for (int t = 0; t < n; ++t) {
    for (int r = 0; r < rows.n(); ++r) {
      double want = 0, size = 0, flushed = 0;
      for (int64_t i = 0; i < k; ++i) {
        const double w = load<DataType::kBFloat16>(rows.row(r), i);
        double left = load<DataType::kFloat32>(tokens.at[t], i) * (weighted ? tokens.weights[t] : 1.0f);
        for (int term = 0; term < kernel.terms; ++term) {
          const double x = bfloat(left);
          want += w * x, size += std::fabs(w * x), left -= x;
          flushed += 0x1p-126 * (std::fabs(w) + std::fabs(x) + 4);
        }
      }
      const float result = got[static_cast<size_t>(t * rows.n() + r)];
      CHECK(std::fabs(result - want) <= roundings * 0x1p-24 * size + flushed,
            "%s k=%ld row %d token %d: %g, expected %g", kernel.name, (long)k, r, t, result, want);
    }
  }
}

struct Case {
  int rows[2], tokens;
  int64_t k, gap;
  bool weighted;
  Data data;
};

void test_products(const std::vector<TileKernel>& kernels, const Case& c) {
  const Rows rows(c.rows[0], c.rows[1], c.k, c.gap, c.data);
  const Tokens tokens(c.tokens, c.k, [&] { return value(c.data); });
  std::vector<float> want;
  for (const TileKernel& kernel : kernels) {
    const Panels panels = pack(kernel, tokens, 0, c.tokens, c.k, c.weighted);
    const std::vector<float> got = multiply(kernel, rows.all, panels, c.tokens, c.k);
    if (want.empty()) want = got;
    if (kernel.isa == Isa::kPortable && c.data == Data::kUsual)
      check_exact(kernel, rows, tokens, c.tokens, c.k, c.weighted, got);
    check_same(kernel, "all", c.k, got, want);
    if (rows.n() > 0) check_parts(kernel, rows.all, tokens, c.tokens, c.k, c.weighted, got);
  }
}

void test_sizes(const std::vector<TileKernel>& kernels) {
  constexpr int kTokens[] = {1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64};
  constexpr int64_t kDepths[] = {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 96, 127, 544, 1023, 2080};
  // Every number of rows of a part, up to more than one group of tiles.
  for (int n = 0; n <= 97; ++n) {
    const int other = n % 3 == 0 ? 0 : n % 3 == 1 ? n : below(98);
    const int64_t k = 1 + below(70);
    test_products(kernels, {{n, other}, kTokens[n % 11], k, n % 2 == 0 ? 0 : below(100), n % 4 < 2, Data::kUsual});
    test_products(kernels, {{other, n}, kTokens[below(11)], k, below(2) * 64, n % 4 < 2, Data::kSpecial});
  }
  for (const int64_t k : kDepths)
    for (const int n : kTokens)
      for (const Data data : {Data::kUsual, Data::kSpecial})
        test_products(kernels, {{below(50), below(20)}, n, k, below(3) * 17, below(2) == 0, data});
}

// Panels that the first projection leaves are those of `pack`, and all entries have the same.
void test_pack_rows(const std::vector<TileKernel>& kernels) {
  for (const int64_t k : {1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 63, 96, 100, 544}) {
    for (const int n : {1, 2, 3, 7, 8, 9, 15, 16}) {
      const Tokens tokens(n, k, [&] { return value(k % 2 == 0 ? Data::kSpecial : Data::kUsual); });
      const Panels portable = pack(kernels[0], tokens, 0, n, k, false);
      for (const TileKernel& kernel : kernels) {
        const auto panel = check_pack_rows(kernel, tokens, n, k);
        CHECK(std::memcmp(panel->data(), portable[0]->data(), static_cast<size_t>(kernel.panel_bytes(k, n))) == 0,
              "%s k=%ld n=%d: the panel is not that of %s", kernel.name, (long)k, n, kernels[0].name);
      }
    }
  }
}

// One token of whole steps is packed as its bfloat16 values: such tokens need not be packed.
void test_plain_token(const std::vector<TileKernel>& kernels) {
  constexpr int64_t k = 96;
  const Tokens tokens(1, k, [] { return value(Data::kSpecial); });
  for (const TileKernel& kernel : kernels) {
    if (kernel.terms != 1) continue;
    const Panels panel = pack(kernel, tokens, 0, 1, k, false);
    CHECK(kernel.panel_bytes(k, 1) == k * 2, "%s", kernel.name);
    for (int64_t i = 0; i < k; ++i) {
      const uint16_t want = bfloat_of_float(tokens.at[0][i]);
      CHECK(std::memcmp(panel[0]->data() + i * 2, &want, 2) == 0, "%s: value %ld", kernel.name, (long)i);
    }
  }
}

// Infinity and NaN reach the results of their row or token and no others; subnormal values are zeros.
void test_special_values(const TileKernel& kernel) {
  constexpr int64_t k = 70;
  constexpr int kRows = 5, kTokens = 18;
  const Rows rows(kRows, 0, k, 0, Data::kUsual);
  const Tokens tokens(kTokens, k, normal);
  const auto set_row = [&](int r, int64_t i, float v) {
    store<DataType::kBFloat16>(const_cast<char*>(rows.row(r)), i, v);
  };
  const auto set = [&](int t, int64_t i, float v) { store<DataType::kFloat32>(tokens.memory[t]->data(), i, v); };
  for (int r = 0; r < kRows; ++r) set_row(r, 64, 2.0f);
  for (int t = 0; t < kTokens; ++t) set(t, 3, 1.0f), set(t, 65, 0x1p100f);
  for (int r = 0; r < kRows; ++r) set_row(r, 65, 0.0f);
  set_row(1, k - 1, kNan), set_row(2, 3, -kInf), set_row(3, 65, 0x1p-130f);
  set(1, 64, kInf), set(2, 64, kNan), set(17, 64, 3.4e38f);  // the last is more than bfloat16 holds
  const std::vector<float> got = multiply(kernel, rows.all, pack(kernel, tokens, 0, kTokens, k, false), kTokens, k);
  for (int t = 0; t < kTokens; ++t) {
    for (int r = 0; r < kRows; ++r) {
      const float result = got[static_cast<size_t>(t * kRows + r)];
      if (t == 2 || r == 1 || (r == 2 && (t == 1 || t == 17)))
        CHECK(std::isnan(result), "%s row %d token %d: %g", kernel.name, r, t, result);
      else if (r == 2 && kernel.terms == 2)
        CHECK(!std::isfinite(result), "%s row %d token %d: %g", kernel.name, r, t, result);
      else if (t == 1 || t == 17 || r == 2)
        CHECK(result == (r == 2 ? -kInf : kInf), "%s row %d token %d: %g", kernel.name, r, t, result);
      else
        CHECK(std::fabs(result) < 100, "%s row %d token %d: %g", kernel.name, r, t, result);
    }
  }
}

// Peak loops count what they do.
void test_peaks() {
#if defined(__x86_64__)
  for (const PeakKernel& kernel : kPeakAmx)
    for (const int64_t steps : {1, 2, 77})
      CHECK(kernel.sum(steps) == static_cast<double>(steps * kernel.multiply_adds * kPeakProduct), "%s", kernel.name);
#endif
}

}  // namespace

int main() {
  say_amx();
  if (amx_status().usable) test_peaks();
  for (int terms = 1; terms <= kTileTerms; ++terms) {
    const std::vector<TileKernel> kernels = runnable([&](const TileKernel& kernel) { return kernel.terms == terms; });
    test_sizes(kernels);
    test_pack_rows(kernels);
    test_plain_token(kernels);
    for (const TileKernel& kernel : kernels) test_special_values(kernel), std::printf("ok %s\n", kernel.name);
  }
  std::printf("tile_bf16: passed\n");
}
