// Every entry of the route family that this CPU can run, on odd sizes between guard pages: scores against double
// arithmetic under derived bounds, choices against their definition, and both on rows that are no numbers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/dispatch.h"
#include "runtime/isa.h"

using namespace hina;

namespace {

constexpr double kUnit = 0x1p-24;  // unit roundoff of float32
constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kSizes[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 60, 63, 64, 65, 80, 128, 255, 257, 512};

std::mt19937 g_random(13);

float normal() { return std::normal_distribution<float>()(g_random); }

std::vector<RouteKernel> kernels() {
  std::vector<RouteKernel> all = route_kernels();
  std::erase_if(all, [](const RouteKernel& kernel) { return kernel.isa > cpu_features().newest; });
  return all;
}

std::vector<float> normals(int64_t n, float scale) {
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = normal() * scale;
  return values;
}

// Between guard pages, and not in place; then in place, for the same bits.
std::vector<float> scores_of(const RouteKernel& kernel, ScoreFn fn, const std::vector<float>& x) {
  const size_t bytes = x.size() * 4;
  Guarded from(bytes), to(bytes);
  std::memcpy(from.data(), x.data(), bytes);
  fn(reinterpret_cast<const float*>(from.data()), reinterpret_cast<float*>(to.data()), static_cast<int64_t>(x.size()));
  CHECK(std::memcmp(from.data(), x.data(), bytes) == 0, "%s changed its input", kernel.name);
  CHECK(to.margin_intact(), "%s wrote before its target", kernel.name);
  std::vector<float> y(x.size()), same = x;
  std::memcpy(y.data(), to.data(), bytes);
  fn(same.data(), same.data(), static_cast<int64_t>(x.size()));
  CHECK(std::memcmp(same.data(), y.data(), bytes) == 0 || std::isnan(y[0]), "%s differs in place", kernel.name);
  return y;
}

// x - max is rounded, which exp turns into |x - max| units; exp itself is off by two, the quotient by one. The sum has
// an error of the mean of those of its terms, weighted, which is below log n (the entropy of the scores) and two, and
// of its additions: n in a row or, in columns, n / 16 and four.
void test_softmax(const RouteKernel& kernel, const std::vector<float>& x) {
  const std::vector<float> y = scores_of(kernel, kernel.softmax, x);
  const double best = *std::max_element(x.begin(), x.end()), n = static_cast<double>(x.size());
  double sum = 0;
  for (const float v : x) sum += std::exp(v - best);
  const double additions = kernel.isa == Isa::kPortable ? n : n / 16 + 4;
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(x[i] - best) / sum;
    const double bound = kUnit * (std::fabs(x[i] - best) + std::log(n) + additions + 6) * want + 0x1p-149;
    CHECK(std::fabs(y[i] - want) <= bound, "%s n=%zu: %a, expected %a", kernel.name, x.size(), y[i], want);
  }
}

// exp is off by two units, the sum and the quotient by one each. Beyond float32 of exp, the result is 0.
void test_sigmoid(const RouteKernel& kernel, const std::vector<float>& x) {
  const std::vector<float> y = scores_of(kernel, kernel.sigmoid, x);
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = 1 / (1 + std::exp(-static_cast<double>(x[i])));
    CHECK(std::fabs(y[i] - want) <= 5 * kUnit * want + 0x1p-127, "%s(%g) = %a, expected %a", kernel.name, x[i], y[i],
          want);
    float alone;
    kernel.sigmoid(&x[i], &alone, 1);
    CHECK(std::memcmp(&alone, &y[i], 4) == 0, "%s depends on the place", kernel.name);
  }
}

void test_scores() {
  for (const RouteKernel& kernel : kernels()) {
    for (const int64_t n : kSizes)
      for (const float scale : {0.01f, 1.0f, 4.0f, 40.0f, 1e30f}) {
        const std::vector<float> x = normals(n, scale);
        test_softmax(kernel, x);
        test_sigmoid(kernel, x);
      }
    for (int round = 0; round < 40; ++round) test_sigmoid(kernel, normals(1000, 30.0f));
    std::printf("ok %s\n", kernel.name);
  }
}

// Wherever the value stands: one that is no number makes NaN of the whole row, but for -infinity beside numbers.
void test_bad_rows() {
  for (const RouteKernel& kernel : kernels())
    for (const int64_t n : {1, 2, 7, 8, 9, 16, 17, 60, 128, 257}) {
      const auto all_nan = [&](const std::vector<float>& x, const char* what) {
        for (const float v : scores_of(kernel, kernel.softmax, x))
          CHECK(std::isnan(v), "%s n=%ld: %g beside %s", kernel.name, (long)n, v, what);
      };
      all_nan(std::vector<float>(static_cast<size_t>(n), -kInf), "-inf only");
      all_nan(std::vector<float>(static_cast<size_t>(n), kNan), "NaN only");
      for (size_t at = 0; at < static_cast<size_t>(n); ++at) {
        std::vector<float> x = normals(n, 1e30f);
        for (const float bad : {kNan, kInf}) {
          x[at] = bad;
          all_nan(x, bad == kInf ? "inf" : "NaN");
          const float y = scores_of(kernel, kernel.sigmoid, x)[at];
          CHECK(bad == kInf ? y == 1.0f : std::isnan(y), "%s: sigmoid %g", kernel.name, y);
        }
        x.assign(static_cast<size_t>(n), -kInf);  // but for one
        x[at] = -3e38f;
        const std::vector<float> y = scores_of(kernel, kernel.softmax, x);
        for (size_t i = 0; i < y.size(); ++i)
          CHECK(y[i] == (i == at ? 1.0f : 0.0f), "%s n=%ld: %g for -inf", kernel.name, (long)n, y[i]);
        const float low = scores_of(kernel, kernel.sigmoid, x)[at];
        CHECK(low == 0.0f, "%s: sigmoid %g", kernel.name, low);
      }
    }
}

// The header promises the same bits on all vector ISAs.
void test_vector_entries_agree() {
  const std::vector<RouteKernel> all = kernels();
  for (size_t other = 2; other < all.size(); ++other)
    for (const int64_t n : kSizes)
      for (const float scale : {1.0f, 20.0f}) {
        const std::vector<float> x = normals(n, scale);
        CHECK(scores_of(all[1], all[1].softmax, x) == scores_of(all[other], all[other].softmax, x), "n=%ld", (long)n);
        CHECK(scores_of(all[1], all[1].sigmoid, x) == scores_of(all[other], all[other].sigmoid, x), "n=%ld", (long)n);
      }
}

// By definition: NaN first, then by size, and equal ones by id.
std::vector<int32_t> ranking(const std::vector<float>& scores, bool ties_to_highest) {
  std::vector<int32_t> ids(scores.size());
  std::iota(ids.begin(), ids.end(), 0);
  if (ties_to_highest) std::reverse(ids.begin(), ids.end());
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    const bool a_nan = std::isnan(scores[a]), b_nan = std::isnan(scores[b]);
    return a_nan || b_nan ? a_nan && !b_nan : scores[a] > scores[b];
  });
  return ids;
}

void test_choice(const RouteKernel& kernel, const std::vector<float>& scores) {
  const int64_t n = static_cast<int64_t>(scores.size());
  Guarded from(scores.size() * 4);
  std::memcpy(from.data(), scores.data(), scores.size() * 4);
  for (const bool ties_to_highest : {false, true}) {
    const std::vector<int32_t> want = ranking(scores, ties_to_highest);
    for (const int64_t k : {int64_t{1}, int64_t{2}, int64_t{8}, int64_t{12}, int64_t{13}, int64_t{22}, int64_t{64},
                            int64_t{65}, n - 1, n}) {
      if (k < 1 || k > n) continue;
      Guarded to(static_cast<size_t>(k) * 4);
      const auto* got = reinterpret_cast<const int32_t*>(to.data());
      kernel.top_k(reinterpret_cast<const float*>(from.data()), n, k, ties_to_highest,
                   reinterpret_cast<int32_t*>(to.data()));
      CHECK(to.margin_intact(), "%s wrote before its ids", kernel.name);
      for (int64_t i = 0; i < k; ++i)
        CHECK(got[i] == want[i], "%s n=%ld k=%ld %s: id %d at %ld, expected %d", kernel.name, (long)n, (long)k,
              ties_to_highest ? "highest" : "lowest", got[i], (long)i, want[i]);
    }
  }
}

void test_top_k() {
  for (const RouteKernel& kernel : kernels()) {
    for (const int64_t n : kSizes) {
      std::vector<float> scores = normals(n, 1.0f);
      test_choice(kernel, scores);
      std::sort(scores.begin(), scores.end());
      test_choice(kernel, scores);
      std::reverse(scores.begin(), scores.end());
      test_choice(kernel, scores);
      for (const float same : {0.25f, 0.0f, -kInf, kInf, kNan})
        test_choice(kernel, std::vector<float>(static_cast<size_t>(n), same));
      constexpr float kFew[] = {-0.0f, 0.0f, 1.0f, -1.0f, kInf, -kInf, 0x1p-149f, kNan};
      for (int round = 0; round < 60; ++round) {  // few values, which tie in any lanes; NaN in every third row
        const unsigned kinds = round % 3 == 0 ? 8 : 2 + g_random() % 6;
        for (float& score : scores) score = kFew[g_random() % kinds];
        test_choice(kernel, scores);
        scores.assign(scores.size(), -1.0f);  // few that matter
        for (unsigned i = 0; i < 1 + g_random() % 9; ++i) scores[g_random() % scores.size()] = kFew[g_random() % kinds];
        test_choice(kernel, scores);
      }
    }
    std::printf("ok %s top_k\n", kernel.name);
  }
}

}  // namespace

int main() {
  test_scores();
  test_bad_rows();
  test_vector_entries_agree();
  test_top_k();
  std::printf("route: passed\n");
}
