// What the tests of both tile families share: tokens, panels and results between guard pages.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/convert/scalar.h"
#include "kernels/dispatch.h"
#include "runtime/amx.h"
#include "runtime/isa.h"

namespace hina {

inline std::mt19937 g_random(7);

inline float normal() { return std::normal_distribution<float>()(g_random); }
inline int below(int n) { return static_cast<int>(g_random() % static_cast<unsigned>(n)); }
inline bool same_value(float a, float b) { return std::isnan(a) ? std::isnan(b) : std::memcmp(&a, &b, 4) == 0; }

inline std::unique_ptr<Guarded> guarded(int64_t size) { return std::make_unique<Guarded>(static_cast<size_t>(size)); }

// Tokens at odd addresses, each ending at a guard page or shortly before it.
struct Tokens {
  Tokens(int n, int64_t k, const std::function<float()>& value) {
    for (int t = 0; t < n; ++t) {
      memory.push_back(guarded(k * 4 + below(2) * below(9)));
      at.push_back(reinterpret_cast<float*>(memory.back()->data()));
      for (int64_t i = 0; i < k; ++i) store<DataType::kFloat32>(memory.back()->data(), i, value());
      weights.push_back(0.5f + std::fabs(normal()));
    }
  }
  std::vector<std::unique_ptr<Guarded>> memory;
  std::vector<const float*> at;
  std::vector<float> weights;
};

using Panels = std::vector<std::unique_ptr<Guarded>>;

inline Panels pack(const TileKernel& kernel, const Tokens& tokens, int from, int n, int64_t k, bool weighted) {
  Panels panels;
  for (int t = from; t < from + n; t += kPanelTokens) {
    const int count = std::min(kPanelTokens, from + n - t);
    const int64_t bytes = kernel.panel_bytes(k, count);
    CHECK(bytes % (4 * count) == 0 && bytes <= count * kernel.panel_bytes(k, 1), "%s: a panel of %ld bytes",
          kernel.name, (long)bytes);
    panels.push_back(guarded(bytes));
    kernel.pack(&tokens.at[t], weighted ? &tokens.weights[t] : nullptr, count, k, panels.back()->data());
    CHECK(panels.back()->margin_intact(), "%s: pack wrote before the panel", kernel.name);
  }
  return panels;
}

// Results as [tokens][rows].
inline std::vector<float> multiply(const TileKernel& kernel, const TileRows* parts, const Panels& panels, int n,
                                   int64_t k) {
  const int rows = parts[0].n + parts[1].n;
  std::vector<const void*> at;
  for (const auto& panel : panels) at.push_back(panel->data());
  const auto memory = guarded(int64_t{4} * rows * n);
  auto* out = reinterpret_cast<float*>(memory->data());
  kernel.multiply(parts, at.data(), n, k, out);
  CHECK(memory->margin_intact(), "%s wrote before its results", kernel.name);
  std::vector<float> results;
  for (int t = 0; t < n; ++t) {
    const int first = t / kPanelTokens * kPanelTokens, count = std::min(kPanelTokens, n - first);
    for (int r = 0; r < rows; ++r) results.push_back(out[first * rows + r * count + t - first]);
  }
  return results;
}

inline void check_same(const TileKernel& kernel, const char* what, int64_t k, const std::vector<float>& got,
                       const std::vector<float>& want) {
  CHECK(got.size() == want.size(), "%s", kernel.name);
  for (size_t i = 0; i < got.size(); ++i)
    CHECK(same_value(got[i], want[i]), "%s k=%ld %s: result %zu of %zu is %a, expected %a", kernel.name, (long)k, what,
          i, got.size(), got[i], want[i]);
}

// Parts of the batch, down to one row and one token, give the results of the whole: no result knows its place.
inline void check_parts(const TileKernel& kernel, const TileRows* rows, const Tokens& tokens, int n, int64_t k,
                        bool weighted, const std::vector<float>& whole) {
  const int64_t units = (k + kUnit - 1) / kUnit;
  for (int round = 0; round < 2; ++round) {
    const int first = below(n), count = round == 0 ? 1 : 1 + below(n - first);
    TileRows parts[2];
    std::vector<int> chosen;
    for (int part = 0; part < 2; ++part) {
      const TileRows& all = rows[part];
      const int from = all.n == 0 ? 0 : below(all.n);
      parts[part] = all;
      parts[part].first = static_cast<const char*>(all.first) + from * all.stride;
      if (all.scales != nullptr) parts[part].scales = all.scales + from * units;
      if (all.zero_points != nullptr) parts[part].zero_points = all.zero_points + from * units;
      parts[part].n = all.n == 0 || round == 0 ? std::min(all.n, 1) : below(all.n - from + 1);
      for (int r = 0; r < parts[part].n; ++r) chosen.push_back((part == 0 ? 0 : rows[0].n) + from + r);
    }
    std::vector<float> want;
    for (int t = first; t < first + count; ++t)
      for (const int r : chosen) want.push_back(whole[static_cast<size_t>(t * (rows[0].n + rows[1].n) + r)]);
    const Panels panels = pack(kernel, tokens, first, count, k, weighted);
    check_same(kernel, "a part", k, multiply(kernel, parts, panels, count, k), want);
  }
}

// The panel that the first projection leaves is that of `pack`, whatever the pieces and their order: returns it.
inline std::unique_ptr<Guarded> check_pack_rows(const TileKernel& kernel, const Tokens& tokens, int n, int64_t k) {
  const int step = kernel.terms > 0 ? 16 : kUnit;
  std::vector<int64_t> cuts = {0};
  while (cuts.back() < k) cuts.push_back(std::min<int64_t>(k, cuts.back() + step * (1 + below(4))));
  std::vector<size_t> order(cuts.size() - 1);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), g_random);
  const int64_t bytes = kernel.panel_bytes(k, n);
  auto panel = guarded(bytes);
  for (const size_t piece : order) {
    const int64_t from = cuts[piece], count = cuts[piece + 1] - from;
    const auto values = guarded(count * n * 4);
    for (int64_t i = 0; i < count * n; ++i)
      store<DataType::kFloat32>(values->data(), i, load<DataType::kFloat32>(tokens.at[i % n], from + i / n));
    kernel.pack_rows(reinterpret_cast<float*>(values->data()), static_cast<int>(count), n, from, k, panel->data());
  }
  CHECK(panel->margin_intact(), "%s: pack_rows wrote before the panel", kernel.name);
  const Panels want = pack(kernel, tokens, 0, n, k, false);
  CHECK(std::memcmp(panel->data(), want[0]->data(), static_cast<size_t>(bytes)) == 0,
        "%s k=%ld n=%d: pack_rows differs from pack", kernel.name, (long)k, n);
  return panel;
}

// Those that `wanted` names and this machine can run, the portable one first; says whether AMX is among what it has.
inline std::vector<TileKernel> runnable(const std::function<bool(const TileKernel&)>& wanted) {
  std::vector<TileKernel> kernels;
  for (const TileKernel& kernel : tile_kernels())
    if (wanted(kernel) &&
        (kernel.isa == Isa::kPortable || (amx_status().usable && kernel.isa <= cpu_features().newest)))
      kernels.push_back(kernel);
  CHECK(!kernels.empty() && kernels[0].isa == Isa::kPortable, "no portable kernel");
  return kernels;
}

inline void say_amx() {
  const AmxStatus& amx = amx_status();
  std::printf("AMX %s: %s\n", amx.usable ? "used" : "skipped", amx.reason.c_str());
}

}  // namespace hina
