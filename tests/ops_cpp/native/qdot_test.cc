// Family qdot: every entry that this CPU can run gives the bits of the portable one, and the portable one those of
// double arithmetic on codes read by hand, within a derived bound. Whatever a kernel touches ends at a guard page, and
// what lies beside it is NaN.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/dispatch.h"
#include "runtime/isa.h"

using namespace hina;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kGap = 3;  // floats between the results of two tokens

std::mt19937 g_random(11);

float normal() { return std::normal_distribution<float>()(g_random); }
int below(int n) { return static_cast<int>(g_random() % static_cast<unsigned>(n)); }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
bool same_value(float a, float b) { return std::isnan(a) ? std::isnan(b) : std::memcmp(&a, &b, 4) == 0; }

int bits_of(WeightFormat format) { return format == WeightFormat::kUint8 || format == WeightFormat::kInt8 ? 8 : 4; }

// The code that a kernel sees for value i of a row.
double code_at(WeightFormat format, const uint8_t* row, int64_t i) {
  constexpr double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  if (format == WeightFormat::kUint8) return row[i];
  if (format == WeightFormat::kInt8) return 128 + static_cast<int8_t>(row[i]);
  const int nibble = i % 2 == 0 ? row[i / 2] % 16 : row[i / 2] / 16;
  if (format == WeightFormat::kInt4) return nibble;
  return 12 + 2 * (nibble < 8 ? e2m1[nibble] : -e2m1[nibble - 8]);
}

// kFractional: zero points that are no whole numbers. kLarge: scales near the top of float32. kSpecial: NaN,
// infinities, subnormals. kExtreme: rows of one code and tokens of one value, which make the largest integer sums.
enum class Data { kUsual, kFractional, kLarge, kSpecial, kExtreme };
constexpr Data kAllData[] = {Data::kUsual, Data::kFractional, Data::kLarge, Data::kSpecial, Data::kExtreme};

// Rows of random codes. Every other one ends at its guard page, the others before some bytes of 0xff; so their
// addresses have any alignment. The rows of every other block share their zero points. `row_bits`: what the readable
// bytes of a row are a multiple of.
class Rows {
 public:
  Rows(WeightFormat format, int n, int64_t k, int unit, int64_t row_bits, Data data)
      : unit_(unit), row_bytes_(ceil_div(k * bits_of(format), row_bits) * row_bits / 8) {
    const int64_t units = ceil_div(k, unit);
    const bool shared = below(2) == 0;
    for (int r = 0; r < n; ++r) {
      char* row = allocate(row_bytes_ + (r % 2 == 0 ? 0 : 1 + below(40)));
      constexpr int kExtremes[] = {0xff, 0x77, 0x00, 0x7f, 0x80};
      const int extreme = kExtremes[below(5)];
      for (int64_t i = 0; i < row_bytes_; ++i)
        row[i] = static_cast<char>(data == Data::kExtreme ? extreme : below(256));
      const int64_t bytes = ceil_div(units, kFactorPad) * kFactorPad * 4;
      auto* scales = reinterpret_cast<float*>(allocate(bytes));
      auto* zero_points = reinterpret_cast<float*>(allocate(bytes));
      for (int64_t u = 0; u < units; ++u) {
        scales[u] = (data == Data::kLarge ? 1e24f : 0.01f) * normal();
        zero_points[u] = static_cast<float>(format == WeightFormat::kMxfp4 ? 12 : below(1 << bits_of(format)));
        if (data == Data::kFractional) zero_points[u] += 0.37f * normal();
      }
      if (data == Data::kSpecial && below(3) == 0) {
        const float special[] = {kNan, kInf, -kInf, 0.0f, -0.0f, 1e-45f, -1e-42f, 3e38f};
        scales[below(static_cast<int>(units))] = special[below(8)];
      }
      values.push_back(row), this->scales.push_back(scales), this->zero_points.push_back(zero_points);
      if (shared) this->zero_points.back() = this->zero_points[0];
    }
  }

  // Rows [from, from + n) of them. What is said to come next lies anywhere, mostly where nothing is.
  QRows view(int from, int n) const {
    const auto anywhere = [] { return reinterpret_cast<const void*>(uintptr_t{g_random()} << below(24)); };
    const QNext next{below(4) == 0 ? nullptr : anywhere(), {anywhere(), anywhere()}, {below(9000), below(2) * 700}};
    return {values.data() + from, scales.data() + from, zero_points.data() + from, n, row_bytes_, unit_, next};
  }
  QRows all() const { return view(0, static_cast<int>(values.size())); }

  std::vector<const void*> values;
  std::vector<const float*> scales, zero_points;

 private:
  char* allocate(int64_t size) {
    memory_.push_back(std::make_unique<Guarded>(static_cast<size_t>(size)));
    return memory_.back()->data();
  }

  int unit_;
  int64_t row_bytes_;
  std::vector<std::unique_ptr<Guarded>> memory_;
};

// A token in the layout of `kernel`, written in the pieces [cuts[i], cuts[i + 1]) in the order of `order`.
std::unique_ptr<Guarded> quantise(const QDotKernel& kernel, const std::vector<float>& x, int unit,
                                  const std::vector<int64_t>& cuts, const std::vector<size_t>& order) {
  const int64_t k = static_cast<int64_t>(x.size()), bytes = kernel.token_bytes(k, unit);
  CHECK(bytes % 64 == 0, "%s: a token of %ld bytes", kernel.name, (long)bytes);
  auto token = std::make_unique<Guarded>(static_cast<size_t>(bytes));
  for (const size_t i : order) {
    Guarded piece(static_cast<size_t>(cuts[i + 1] - cuts[i]) * 4);
    std::memcpy(piece.data(), x.data() + cuts[i], static_cast<size_t>(cuts[i + 1] - cuts[i]) * 4);
    kernel.quantise(reinterpret_cast<const float*>(piece.data()), cuts[i], cuts[i + 1], k, unit, token->data());
  }
  CHECK(token->margin_intact(), "%s: quantise wrote before the token", kernel.name);
  return token;
}

std::unique_ptr<Guarded> quantise(const QDotKernel& kernel, const std::vector<float>& x, int unit) {
  return quantise(kernel, x, unit, {0, static_cast<int64_t>(x.size())}, {0});
}

struct Tokens {
  Tokens(const QDotKernel& kernel, const std::vector<std::vector<float>>& xs, int unit) {
    for (const std::vector<float>& x : xs) {
      memory.push_back(quantise(kernel, x, unit));
      pointers.push_back(memory.back()->data());
    }
  }
  std::vector<std::unique_ptr<Guarded>> memory;
  std::vector<const void*> pointers;
};

using Compute = std::function<void(float* out, int64_t out_stride)>;

// The results [tokens][rows] of a call, and whether it wrote nothing else.
std::vector<float> results(const char* name, int n_rows, int n_tokens, const Compute& compute) {
  const int64_t stride = n_rows + kGap;
  const int64_t size = n_tokens == 0 ? 0 : (n_tokens - 1) * stride + n_rows;
  Guarded memory(static_cast<size_t>(size) * 4);
  auto* out = reinterpret_cast<float*>(memory.data());
  compute(out, stride);
  CHECK(memory.margin_intact(), "%s wrote before its results", name);
  std::vector<float> all;
  const uint32_t untouched = 0xffffffffu;
  for (int64_t i = 0; i < size; ++i) {
    if (i % stride < n_rows)
      all.push_back(out[i]);
    else
      CHECK(std::memcmp(out + i, &untouched, 4) == 0, "%s wrote beside its results", name);
  }
  return all;
}

std::vector<float> few(const QDotKernel& kernel, const QRows& rows, const void* const* tokens, int n_tokens,
                       int64_t k) {
  return results(kernel.name, rows.n, n_tokens,
                 [&](float* out, int64_t out_stride) { kernel.few(rows, tokens, n_tokens, k, out, out_stride); });
}

std::vector<float> many(const QDotKernel& kernel, const QRows& rows, const void* const* tokens, int n_tokens,
                        int64_t k) {
  const int64_t bytes = kernel.panel_bytes(k, rows.unit);
  CHECK(bytes % 64 == 0, "%s: a panel of %ld bytes", kernel.name, (long)bytes);
  Guarded panel(static_cast<size_t>(bytes));
  kernel.pack(rows, k, panel.data());
  CHECK(panel.margin_intact(), "%s: pack wrote before the panel", kernel.name);
  return results(kernel.name, rows.n, n_tokens, [&](float* out, int64_t out_stride) {
    kernel.many(panel.data(), rows.n, rows.unit, tokens, n_tokens, k, out, out_stride);
  });
}

void check_same(const char* name, const char* function, int64_t k, const std::vector<float>& got,
                const std::vector<float>& want) {
  CHECK(got.size() == want.size(), "%s", name);
  for (size_t i = 0; i < got.size(); ++i)
    CHECK(same_value(got[i], want[i]), "%s %s k=%ld result %zu of %zu: %a, expected %a", name, function, (long)k, i,
          got.size(), got[i], want[i]);
}

struct Quantised {
  std::vector<double> codes;
  std::vector<float> scales;
};

// The formulas of qdot.h, value by value.
Quantised by_hand(const std::vector<float>& x, int unit) {
  Quantised q;
  for (size_t begin = 0; begin < x.size(); begin += static_cast<size_t>(unit)) {
    const std::vector<float> part(x.begin() + begin, x.begin() + std::min(begin + unit, x.size()));
    float amax = 0;
    for (const float v : part) amax = std::isfinite(v) ? std::max(amax, std::fabs(v)) : kInf;
    const bool all_zero = amax < 0x1p-100f || std::isinf(amax);
    q.scales.push_back(std::isinf(amax) ? kNan : all_zero ? 0.0f : amax / 127.0f);
    for (const float v : part) q.codes.push_back(all_zero ? 0.0 : std::rint(v * (127.0f / amax)));
  }
  return q;
}

// One rounding of the inner fma (none for whole zero points), one of the product of the scales, and one fma for each
// unit that follows: a term meets at most units + 2 of them; one more covers their products among each other.
void check_exact(const QDotKernel& kernel, const QRows& rows, const std::vector<std::vector<float>>& xs,
                 const std::vector<float>& got) {
  for (size_t t = 0; t < xs.size(); ++t) {
    const Quantised token = by_hand(xs[t], rows.unit);
    for (int r = 0; r < rows.n; ++r) {
      double want = 0, size = 0;
      for (size_t u = 0; u < token.scales.size(); ++u) {
        double term = 0;
        for (size_t i = u * rows.unit; i < std::min((u + 1) * rows.unit, token.codes.size()); ++i)
          term += (code_at(kernel.format, static_cast<const uint8_t*>(rows.values[r]), static_cast<int64_t>(i)) -
                   rows.zero_points[r][u]) *
                  token.codes[i];
        term *= static_cast<double>(rows.scales[r][u]) * token.scales[u];
        want += term;
        size += std::fabs(term);
      }
      const double bound = static_cast<double>(token.scales.size() + 3) * 0x1p-24 * size;
      const float result = got[t * rows.n + r];
      CHECK(std::fabs(result - want) <= bound, "%s k=%zu row %d token %zu: %g, expected %g", kernel.name, xs[t].size(),
            r, t, result, want);
    }
  }
}

// Parts of the batch, down to one row and one token, give the results of the whole.
void check_parts(const QDotKernel& kernel, const Rows& rows, const Tokens& tokens, int64_t k,
                 const std::vector<float>& whole) {
  const int n = static_cast<int>(rows.values.size()), n_tokens = static_cast<int>(tokens.pointers.size());
  for (int i = 0; i < 2; ++i) {
    const int from = below(n), count = i == 0 ? 1 : 1 + below(n - from);
    const int first = below(n_tokens), count_tokens = i == 0 ? 1 : 1 + below(n_tokens - first);
    std::vector<float> want;
    for (int t = first; t < first + count_tokens; ++t)
      for (int r = from; r < from + count; ++r) want.push_back(whole[static_cast<size_t>(t * n + r)]);
    const QRows part = rows.view(from, count);
    const void* const* some = tokens.pointers.data() + first;
    check_same(kernel.name, "many, a part,", k, many(kernel, part, some, count_tokens, k), want);
    if (kernel.few != nullptr && part.unit == kUnit)
      check_same(kernel.name, "few, a part,", k, few(kernel, part, some, count_tokens, k), want);
  }
}

std::vector<float> random_token(int64_t k, Data data = Data::kUsual) {
  std::vector<float> x(static_cast<size_t>(k));
  const float size = std::exp(4 * normal());
  if (data == Data::kExtreme) return std::vector<float>(static_cast<size_t>(k), below(2) == 0 ? size : -size);
  for (float& v : x) v = size * normal();
  if (below(4) == 0) std::fill(x.begin(), x.begin() + std::min<int64_t>(k, 40), 0.0f);
  return x;
}

// One block of rows and some tokens, through every entry of the format; kernels[0] is the portable one.
void test_block(const std::vector<QDotKernel>& kernels, int n, int n_tokens, int64_t k, int unit, int64_t row_bits,
                Data data) {
  const Rows rows(kernels[0].format, n, k, unit, row_bits, data);
  std::vector<std::vector<float>> xs;
  for (int t = 0; t < n_tokens; ++t) xs.push_back(random_token(k, data));
  if (data == Data::kSpecial && n_tokens > 2) xs[1][static_cast<size_t>(below(static_cast<int>(k)))] = kNan;
  std::vector<float> want;
  for (const QDotKernel& kernel : kernels) {
    const Tokens tokens(kernel, xs, unit);
    const std::vector<float> got = many(kernel, rows.all(), tokens.pointers.data(), n_tokens, k);
    if (want.empty()) {
      want = got;
      if (data != Data::kSpecial) check_exact(kernel, rows.all(), xs, got);
    }
    check_same(kernel.name, "many", k, got, want);
    if (kernel.few != nullptr && unit == kUnit)
      check_same(kernel.name, "few", k, few(kernel, rows.all(), tokens.pointers.data(), n_tokens, k), want);
    if (n > 0 && n_tokens > 0) check_parts(kernel, rows, tokens, k, want);
  }
}

// Blocks of more rows than `pack` takes: the results of their parts.
void test_wide_block(const std::vector<QDotKernel>& kernels, int n, int n_tokens, int64_t k) {
  const Rows rows(kernels[0].format, n, k, kUnit, 8, Data::kFractional);
  std::vector<std::vector<float>> xs;
  for (int t = 0; t < n_tokens; ++t) xs.push_back(random_token(k));
  for (const QDotKernel& kernel : kernels) {
    if (kernel.few == nullptr) continue;
    const Tokens tokens(kernel, xs, kUnit);
    const std::vector<float> got = few(kernel, rows.all(), tokens.pointers.data(), n_tokens, k);
    for (int from = 0; from < n; from += kMaxQRows) {
      const int count = std::min(kMaxQRows, n - from);
      const std::vector<float> part = many(kernel, rows.view(from, count), tokens.pointers.data(), n_tokens, k);
      std::vector<float> of_got;
      for (int t = 0; t < n_tokens; ++t)
        of_got.insert(of_got.end(), got.begin() + t * n + from, got.begin() + t * n + from + count);
      check_same(kernel.name, "few, many rows,", k, of_got, part);
    }
  }
}

void test_dots(const std::vector<QDotKernel>& kernels) {
  const int64_t bits = bits_of(kernels[0].format);
  for (const int unit : {16, 32}) {
    for (const int64_t k :
         {1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 160, 256, 544, 768, 2048, 2080}) {
      for (const int64_t row_bits : {int64_t{8}, unit * bits, 256 * bits})
        for (const Data data : kAllData)
          test_block(kernels, 1 + below(kMaxQRows), 1 + below(19), k, unit, row_bits, data);
      test_block(kernels, kMaxQRows, 1, k, unit, 8, Data::kUsual);
    }
    for (int n = 0; n <= kMaxQRows; ++n) test_block(kernels, n, n % 20, 65, unit, 8, Data::kFractional);
    test_block(kernels, 19, 101, 544, unit, 8, Data::kUsual);
  }
  for (const int64_t k : {1, 65, 384, 2048})
    for (const int n : {kMaxFewRows, 1 + below(kMaxFewRows), 1 + below(kMaxFewRows)})
      test_wide_block(kernels, n, 1 + below(6), k);
}

// -0.127 times the smallest subnormal rounds to -0.0, and padding to more units must not make +0.0 of it.
void test_negative_zero(const std::vector<QDotKernel>& kernels) {
  const uint8_t row[16] = {};
  const float scale = std::numeric_limits<float>::denorm_min();
  const float zero_point = static_cast<float>(code_at(kernels[0].format, row, 0)) + 0.001f;
  const void* values = row;
  const float all_scales[kFactorPad] = {scale}, all_zero_points[kFactorPad] = {zero_point};
  const float *scales = all_scales, *zero_points = all_zero_points;
  const QRows rows{&values, &scales, &zero_points, 1, 1, kUnit};
  for (const QDotKernel& kernel : kernels) {
    const auto token = quantise(kernel, {127.0f}, kUnit);
    const void* tokens = token->data();
    check_same(kernel.name, "many", 1, many(kernel, rows, &tokens, 1, 1), {-0.0f});
    if (kernel.few != nullptr) check_same(kernel.name, "few", 1, few(kernel, rows, &tokens, 1, 1), {-0.0f});
  }
}

// Every code of a token by itself: row i has one weight 1 at i and zeros else (as codes: z + 1 and z, where z is the
// zero point), so that its result is fma(code, scale, 0).
std::vector<float> read_codes(const QDotKernel& kernel, const void* token, int64_t k, int unit) {
  const bool is_int8 = kernel.format == WeightFormat::kInt8, is_mxfp4 = kernel.format == WeightFormat::kMxfp4;
  const uint8_t zero = is_int8 || is_mxfp4 ? 0 : 8;  // as it is stored; the next one is 1 in all formats
  const float scale[kFactorPad] = {1.0f}, zero_point[kFactorPad] = {is_int8 ? 128.0f : is_mxfp4 ? 12.0f : 8.0f};
  const int bits = bits_of(kernel.format);
  const int64_t row_bytes = ceil_div(k * bits, 8);
  std::vector<std::vector<uint8_t>> rows(
      static_cast<size_t>(k),
      std::vector<uint8_t>(static_cast<size_t>(row_bytes), static_cast<uint8_t>(bits == 8 ? zero : zero * 17)));
  std::vector<const void*> values;
  for (int64_t i = 0; i < k; ++i) {
    uint8_t* row = rows[static_cast<size_t>(i)].data();
    row[i * bits / 8] = static_cast<uint8_t>(row[i * bits / 8] + (bits == 4 && i % 2 == 1 ? 16 : 1));
    values.push_back(row);
  }
  const std::vector<const float*> scales(values.size(), scale), zero_points(values.size(), zero_point);
  return many(kernel, {values.data(), scales.data(), zero_points.data(), static_cast<int>(k), row_bytes, unit}, &token,
              1, k);
}

void test_codes(const QDotKernel& kernel) {
  constexpr float kMax = std::numeric_limits<float>::max(), kTiny = std::numeric_limits<float>::denorm_min();
  const std::vector<std::vector<float>> all = {
      {0.0f, -0.0f},
      {kTiny, -kTiny},
      {0x1.fffffep-101f, 0x1p-120f},
      {0x1p-100f, -0x1p-101f, kTiny},
      {kMax, -kMax, 1.0f, -kMax / 2},
      {1.0f, kNan},
      {kInf, 1.0f},
      {1.0f, 2.0f, -kInf},
      {127.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -126.5f, 0.49999997f, 0.50000006f},
      {-254.0f, 1.0f, 3.0f, 5.0f, 7.0f, -9.0f}};
  for (const int unit : {16, 32}) {
    for (const int k : {2, 3, 8, 15, 16, 17, 31, 32}) {
      for (std::vector<float> x : all) {
        if (k > unit || static_cast<size_t>(k) < x.size()) continue;
        std::rotate(x.begin(), x.begin() + below(static_cast<int>(x.size())), x.end());
        while (x.size() < static_cast<size_t>(k)) x.insert(x.begin() + below(2), x[0] * 0.25f);
        const Quantised want = by_hand(x, unit);
        const std::vector<float> got = read_codes(kernel, quantise(kernel, x, unit)->data(), k, unit);
        for (size_t i = 0; i < x.size(); ++i) {
          const float value = std::fma(static_cast<float>(want.codes[i]), want.scales[0], 0.0f);
          CHECK(same_value(got[i], value), "%s: %a of amax / 127 = %a gave %a, expected %a", kernel.name, x[i],
                want.scales[0], got[i], value);
        }
      }
    }
  }
}

void test_pieces(const QDotKernel& kernel) {
  for (const int unit : {16, 32}) {
    for (const int64_t k : {15, 33, 96, 160, 544, 2080}) {
      const std::vector<float> x = random_token(k);
      std::vector<int64_t> cuts = {0};
      while (cuts.back() < k) cuts.push_back(std::min<int64_t>(k, cuts.back() + unit * (1 + below(3))));
      std::vector<size_t> order(cuts.size() - 1);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), g_random);
      // Memory begins as 0xff in both, so that they agree where nothing is written.
      CHECK(std::memcmp(quantise(kernel, x, unit)->data(), quantise(kernel, x, unit, cuts, order)->data(),
                        static_cast<size_t>(kernel.token_bytes(k, unit))) == 0,
            "%s k=%ld unit=%d: pieces give another token", kernel.name, (long)k, unit);
    }
  }
}

}  // namespace

int main() {
  for (const WeightFormat format :
       {WeightFormat::kUint8, WeightFormat::kInt8, WeightFormat::kInt4, WeightFormat::kMxfp4}) {
    std::vector<QDotKernel> kernels;
    for (const QDotKernel& kernel : qdot_kernels())
      if (kernel.format == format && kernel.isa <= cpu_features().newest) kernels.push_back(kernel);
    CHECK(!kernels.empty() && kernels[0].isa == Isa::kPortable, "no portable kernel of format %d", (int)format);
    for (const QDotKernel& kernel : kernels) test_codes(kernel), test_pieces(kernel);
    test_dots(kernels);
    test_negative_zero(kernels);
    for (const QDotKernel& kernel : kernels) std::printf("ok %s\n", kernel.name);
  }
  std::printf("qdot: passed\n");
}
