// Family tile, int8: every entry that this machine can run gives the bits of the portable entry of qdot. Whatever a
// kernel touches ends at a guard page, and what lies beside it is NaN.
#include <limits>

#include "kernels/tables.h"
#include "tile_check.h"

using namespace hina;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

bool is_nibbles(WeightFormat format) { return format == WeightFormat::kInt4 || format == WeightFormat::kMxfp4; }
int64_t units_of(int64_t k) { return (k + kUnit - 1) / kUnit; }

// kFractional: zero points that are no whole numbers. kLarge: scales near the top of float32. kSpecial: NaN,
// infinities, subnormals, in rows and tokens. kExtreme: rows of one code and tokens of one value, which make the
// largest integer sums.
enum class Data { kUsual, kFractional, kLarge, kSpecial, kExtreme };
constexpr Data kAllData[] = {Data::kUsual, Data::kFractional, Data::kLarge, Data::kSpecial, Data::kExtreme};

// Of a whole token, so that units of zeros and of tiny values occur.
std::function<float()> values_of(Data data) {
  const float size = std::exp(4 * normal());
  return [=] {
    constexpr float special[] = {kNan, kInf, -kInf, 1e-45f, 3e38f, 0x1p-100f, 0x1p-101f};
    if (data == Data::kExtreme) return size;
    if (data == Data::kSpecial && below(300) == 0) return special[below(7)];
    return size * normal();
  };
}

// One part: its rows as they lie in the model, their factors, and a middle for all zero points if there are none.
struct Part {
  Part(WeightFormat format, int n, int64_t k, int64_t gap, bool centred, Data data) : format(format), n(n), k(k) {
    row_bytes = is_nibbles(format) ? (k + 1) / 2 : k;
    stride = row_bytes + gap;
    const int64_t units = units_of(k);
    rows = guarded(n == 0 ? 0 : (n - 1) * stride + row_bytes);
    scales = guarded(n * units * 4), zero_points = guarded(n * units * 4);
    constexpr int kExtremes[] = {0xff, 0x77, 0x00, 0x7f, 0x80};
    const int extreme = kExtremes[below(5)];
    for (int r = 0; r < n; ++r)
      for (int64_t i = 0; i < row_bytes; ++i)
        rows->data()[r * stride + i] = static_cast<char>(data == Data::kExtreme ? extreme : below(256));
    for (int64_t i = 0; i < n * units; ++i) {
      constexpr float special[] = {kNan, kInf, -kInf, 0.0f, -0.0f, 1e-45f, -1e-42f, 3e38f};
      float scale = (data == Data::kLarge ? 1e24f : 0.01f) * normal(), zero_point = middle();
      if (data == Data::kSpecial && below(200) == 0) scale = special[below(8)];
      if (!centred && format != WeightFormat::kMxfp4)
        zero_point = static_cast<float>(below(is_nibbles(format) ? 16 : 256));
      if (!centred && data == Data::kFractional) zero_point += 0.37f * normal();
      store<DataType::kFloat32>(scales->data(), i, scale);
      store<DataType::kFloat32>(zero_points->data(), i, zero_point);
    }
    is_centred = centred;
  }

  float middle() const {
    return format == WeightFormat::kInt4 ? 8.0f : format == WeightFormat::kMxfp4 ? 12.0f : 128.0f;
  }

  // As `kernel` takes them.
  TileRows rows_for(const TileKernel& kernel, std::unique_ptr<Guarded>& unpacked) const {
    TileRows result{rows->data(), stride, n, reinterpret_cast<float*>(scales->data()),
                    is_centred ? nullptr : reinterpret_cast<float*>(zero_points->data())};
    CHECK((kernel.unpack != nullptr) == is_nibbles(format), "%s", kernel.name);
    if (kernel.unpack == nullptr) return result;
    std::vector<const void*> at;
    for (int r = 0; r < n; ++r) at.push_back(rows->data() + r * stride);
    result.stride = (units_of(k) + below(3)) * kUnit;
    // Rows of bytes begin at a multiple of 64.
    const int64_t bytes = n * result.stride, padding = bytes % 64;
    unpacked = guarded(bytes + padding);
    kernel.unpack(at.data(), n, row_bytes, k, is_centred, unpacked->data(), result.stride);
    CHECK(unpacked->margin_intact(), "%s: unpack wrote before its rows", kernel.name);
    for (int64_t i = bytes; i < bytes + padding; ++i)
      CHECK(unpacked->data()[i] == static_cast<char>(0xff), "%s: unpack wrote behind its rows", kernel.name);
    result.first = unpacked->data();
    return result;
  }

  WeightFormat format;
  int n;
  int64_t k, row_bytes, stride;
  bool is_centred;
  std::unique_ptr<Guarded> rows, scales, zero_points;
};

// What the portable entry of qdot makes of it, as [tokens][rows].
std::vector<float> reference(const Part* parts, const Tokens& tokens, int n_tokens, int64_t k, bool weighted) {
  const QDotKernel& kernel = kQDotPortable[static_cast<int>(parts[0].format) - 1];
  CHECK(kernel.format == parts[0].format, "%s is not in its place", kernel.name);
  std::vector<std::vector<char>> quantised;
  std::vector<const void*> at;
  for (int t = 0; t < n_tokens; ++t) {
    std::vector<float> x;
    for (int64_t i = 0; i < k; ++i)
      x.push_back(load<DataType::kFloat32>(tokens.at[t], i) * (weighted ? tokens.weights[t] : 1.0f));
    quantised.emplace_back(kernel.token_bytes(k, kUnit));
    kernel.quantise(x.data(), 0, k, k, kUnit, quantised.back().data());
    at.push_back(quantised.back().data());
  }
  const int n_rows = parts[0].n + parts[1].n;
  std::vector<float> out(static_cast<size_t>(n_rows * n_tokens));
  for (int p = 0, row = 0; p < 2; ++p) {
    for (int r = 0; r < parts[p].n; ++r, ++row) {
      const void* values = parts[p].rows->data() + r * parts[p].stride;
      const float* scales = reinterpret_cast<float*>(parts[p].scales->data()) + r * units_of(k);
      const float* zero_points = reinterpret_cast<float*>(parts[p].zero_points->data()) + r * units_of(k);
      kernel.few({&values, &scales, &zero_points, 1, parts[p].row_bytes, kUnit}, at.data(), n_tokens, k, &out[row],
                 n_rows);
    }
  }
  return out;
}

struct Case {
  int rows[2], tokens;
  int64_t k, gap;
  bool centred[2], weighted;
  Data data;
};

void test_products(const std::vector<TileKernel>& kernels, const Case& c) {
  const WeightFormat format = kernels[0].format;
  const Part parts[2] = {{format, c.rows[0], c.k, c.gap, c.centred[0], c.data},
                         {format, c.rows[1], c.k, c.gap, c.centred[1], c.data}};
  const Tokens tokens(c.tokens, c.k, values_of(c.data));
  const std::vector<float> want = reference(parts, tokens, c.tokens, c.k, c.weighted);
  for (const TileKernel& kernel : kernels) {
    std::unique_ptr<Guarded> unpacked[2];
    const TileRows rows[2] = {parts[0].rows_for(kernel, unpacked[0]), parts[1].rows_for(kernel, unpacked[1])};
    const Panels panels = pack(kernel, tokens, 0, c.tokens, c.k, c.weighted);
    const std::vector<float> got = multiply(kernel, rows, panels, c.tokens, c.k);
    check_same(kernel, "all", c.k, got, want);
    check_parts(kernel, rows, tokens, c.tokens, c.k, c.weighted, got);
  }
}

void test_sizes(const std::vector<TileKernel>& kernels) {
  constexpr int kTokens[] = {1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64};
  constexpr int64_t kDepths[] = {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 160, 545, 1023, 2080};
  const auto yes = [] { return below(2) == 0; };
  // Every number of rows of a part, up to more than one group of tiles.
  for (int n = 0; n <= 97; ++n) {
    const int other = n % 3 == 0 ? 0 : n % 3 == 1 ? n : below(98);
    const int64_t k = 1 + below(140);
    const bool centred = yes();
    test_products(kernels,
                  {{n, other}, kTokens[n % 11], k, n % 2 * below(100), {centred, centred}, yes(), Data::kUsual});
    test_products(kernels, {{other, n}, kTokens[below(11)], k, below(2) * 64, {yes(), yes()}, yes(), kAllData[n % 5]});
  }
  for (const int64_t k : kDepths)
    for (const int n : kTokens)
      test_products(kernels, {{below(40), below(20)}, n, k, below(3) * 17, {yes(), yes()}, yes(), kAllData[below(5)]});
}

void test_pack_rows(const std::vector<TileKernel>& kernels) {
  for (const int64_t k : {1, 2, 15, 31, 32, 33, 63, 64, 65, 96, 100, 545})
    for (const int n : {1, 2, 3, 7, 8, 9, 15, 16})
      for (const Data data : {Data::kUsual, Data::kSpecial, Data::kExtreme}) {
        const Tokens tokens(n, k, values_of(data));
        for (const TileKernel& kernel : kernels) check_pack_rows(kernel, tokens, n, k);
      }
}

// A panel of n tokens is n panels of one token, taken in turns.
void test_turns(const std::vector<TileKernel>& kernels) {
  for (const int64_t k : {1, 32, 65, 160}) {
    for (const int n : {2, 7, 16}) {
      const Tokens tokens(n, k, values_of(Data::kUsual));
      for (const TileKernel& kernel : kernels) {
        const Panels all = pack(kernel, tokens, 0, n, k, true);
        const int64_t groups = kernel.panel_bytes(k, 1) / 4;
        CHECK(kernel.panel_bytes(k, n) == groups * 4 * n, "%s", kernel.name);
        for (int t = 0; t < n; ++t) {
          const Panels one = pack(kernel, tokens, t, 1, k, true);
          for (int64_t g = 0; g < groups; ++g)
            CHECK(std::memcmp(one[0]->data() + g * 4, all[0]->data() + (g * n + t) * 4, 4) == 0,
                  "%s k=%ld: group %ld of token %d of %d", kernel.name, (long)k, (long)g, t, n);
        }
      }
    }
  }
}

}  // namespace

int main() {
  say_amx();
  for (const WeightFormat format :
       {WeightFormat::kUint8, WeightFormat::kInt8, WeightFormat::kInt4, WeightFormat::kMxfp4}) {
    const std::vector<TileKernel> kernels =
        runnable([=](const TileKernel& kernel) { return kernel.terms == 0 && kernel.format == format; });
    test_sizes(kernels);
    test_pack_rows(kernels);
    test_turns(kernels);
    for (const TileKernel& kernel : kernels) std::printf("ok %s\n", kernel.name);
  }
  std::printf("tile_int8: passed\n");
}
