// Times the kernels of every table that this CPU can run, on one thread, once they agree with the portable ones.
//
//   kernels_bench [TEXT]     only kernels whose name holds TEXT
//
// What the figures are held against is measured in the same run: the peak of multiply-adds of each instruction set, and
// what a plain loop reads from memory. Products are timed twice. With all they read in the L2 cache: GFLOP/s, and the
// share of that peak. With rows that come from memory: GB/s of rows, and the share of the bound, which is the slower of
// reading each row once and of multiplying at the peak. Compare figures of one run only, on an idle machine.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/peak/peak.h"
#include "runtime/amx.h"
#include "runtime/isa.h"

using namespace hina;

namespace {

constexpr int kRows = 32;         // rows of a block, as the layer calls kernels ..
constexpr int kRowsOfTiles = 96;  // .. and those of tiles
constexpr int kTokens[] = {1, 2, 4, 8, 16, 32, 64};
constexpr int kMostTokens = 64;
constexpr int64_t kDepths[] = {768, 2048};     // k
constexpr int64_t kMemory = int64_t{1} << 30;  // bytes, well beyond the caches
constexpr int64_t kBurst = int64_t{1} << 20;   // bytes of rows that are read from memory at a time
constexpr double kBudget = 0.06;               // seconds for one figure

#define REQUIRE(condition, ...)                \
  do {                                         \
    if (!(condition)) {                        \
      std::fprintf(stderr, "kernels_bench: "); \
      std::fprintf(stderr, __VA_ARGS__);       \
      std::fputc('\n', stderr);                \
      std::exit(1);                            \
    }                                          \
  } while (0)

// Processor time of this thread: what other processes take meanwhile does not count.
double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Seconds of one call of `run`, of bursts of at least half a millisecond: the least or, where the luckiest burst may
// have found in a cache what should come from memory, that at a tenth from the least.
double time_of(const std::function<void()>& run, bool least = true, double budget = kBudget) {
  run();
  std::vector<double> times;
  int calls = 1;
  for (const double start = now(); now() - start < budget || times.empty();) {
    const double from = now();
    for (int i = 0; i < calls; ++i) run();
    const double seconds = now() - from;
    if (seconds < 5e-4)
      calls *= 2;
    else
      times.push_back(seconds / calls);
  }
  std::sort(times.begin(), times.end());
  return times[least ? 0 : times.size() / 10];
}

// --- ceilings ---

// Eight streams: one alone does not make a core fetch as much as it can.
void read_all(const char* from, int64_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(16), may_alias));
  constexpr int kStreams = 8;
  Words sums[kStreams] = {};
  for (int64_t i = 0; i < bytes / kStreams; i += 16)
    for (int s = 0; s < kStreams; ++s) sums[s] += *reinterpret_cast<const Words*>(from + s * (bytes / kStreams) + i);
  for (Words& s : sums) __asm__ volatile("" : : "m"(s));
}

// Operations per second of the fastest loop of kernels/peak/ that needs no more than `isa`, and AMX only if `amx`.
double peak_of(PeakType type, Isa isa, bool amx = false) {
  std::vector<PeakKernel> kernels(std::begin(kPeakPortable), std::end(kPeakPortable));
#ifdef HINA_X86_KERNELS
  const auto add = [&](const auto& table) { kernels.insert(kernels.end(), std::begin(table), std::end(table)); };
  add(kPeakAvx2), add(kPeakAvx512), add(kPeakAvx512Vnni), add(kPeakAvx512Bf16);
  if (amx) add(kPeakAmx);
#endif
  double best = 0;
  for (const PeakKernel& kernel : kernels) {
    if (kernel.type != type || kernel.isa > isa || kernel.isa > cpu_features().newest) continue;
    const double seconds = time_of([&] { kernel.sum(kPeakSteps); }, true, 0.2);
    best = std::max(best, 2.0 * static_cast<double>(kPeakSteps * kernel.multiply_adds) / seconds);
  }
  return best;
}

struct Ceilings {
  double read = 0;               // bytes per second from memory
  double flops[kIsaCount] = {};  // of float32, per second
  double flops_bfloat16 = 0;     // 0 where there are no such instructions ..
  double tiles_bfloat16 = 0;     // .. or tiles
};

Ceilings measure_ceilings(const char* memory) {
  Ceilings c;
  int64_t at = 0;
  c.read = kBurst / time_of([&] { read_all(memory + at, kBurst), at = (at + kBurst) % kMemory; }, false, 0.5);
  std::printf("read loop %.1f GB/s", c.read * 1e-9);
  for (int i = 0; i <= static_cast<int>(cpu_features().newest); ++i) {
    const Isa isa = static_cast<Isa>(i);
    // VNNI and BF16 do not change float32.
    c.flops[i] = isa > Isa::kAvx512 ? c.flops[i - 1] : peak_of(PeakType::kFloat32, isa);
    if (isa <= Isa::kAvx512) std::printf(", float32 %s %.1f GFLOP/s", isa_name(isa), c.flops[i] * 1e-9);
  }
  c.flops_bfloat16 = peak_of(PeakType::kBFloat16, cpu_features().newest);
  std::printf(", bfloat16 %.1f GFLOP/s", c.flops_bfloat16 * 1e-9);
  if (amx_status().usable) {
    c.tiles_bfloat16 = peak_of(PeakType::kBFloat16, cpu_features().newest, true);
    std::printf(", in tiles %.0f GFLOP/s", c.tiles_bfloat16 * 1e-9);
  }
  std::printf("\n");
  return c;
}

// --- products ---

// A kernel that multiplies a block of rows with tokens, as this program runs it.
struct Product {
  using Run = std::function<void(const char* rows, int n_tokens)>;  // against the block of rows at `rows`

  const char* name;
  Isa isa;
  int rows;                                     // of a block
  double flops;                                 // its ceiling, per second
  std::function<int64_t(int64_t k)> row_bytes;  // what a row of k values reads, scales included
  std::function<Run(int64_t k)> prepare;        // verifies the kernel, and says how to run it
};

struct alignas(64) Line {  // rows and tokens begin at a cache line, as those of a layer do
  char bytes[64];
};
using Lines = std::vector<Line>;

int64_t size_of(DataType type) { return type == DataType::kFloat32 ? 4 : 2; }

Lines lines_of(DataType type, const std::vector<float>& values) {
  Lines lines(values.size() * static_cast<size_t>(size_of(type)) / sizeof(Line));
  const NarrowFn narrow = select_kernels(Isa::kPortable).narrow[static_cast<int>(type)];
  narrow(values.data(), lines.data(), static_cast<int64_t>(values.size()));
  return lines;
}

// Values in [-1, 1] that every float type can hold.
std::vector<float> random_values(int64_t n) {
  std::mt19937 random(static_cast<unsigned>(n));
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(static_cast<float>(static_cast<int>(random() % 257) - 128) / 128.0f);
  return values;
}

void run_dot(const DotKernel& kernel, const void* rows, const void* tokens, int n_tokens, int64_t k, float* out) {
  const void* row[kRows];
  const void* token[kMostTokens];
  for (int r = 0; r < kRows; ++r) row[r] = static_cast<const char*>(rows) + r * k * size_of(kernel.weight_type);
  for (int t = 0; t < n_tokens; ++t) token[t] = static_cast<const char*>(tokens) + t * k * size_of(kernel.token_type);
  kernel.fn(row, kRows, token, n_tokens, k, out, kRows);
}

Product::Run prepare_dot(const DotKernel& kernel, int64_t k) {
  const std::vector<float> rows = random_values(kRows * k), tokens = random_values(kMostTokens * k);
  const auto narrow_tokens = std::make_shared<Lines>(lines_of(kernel.token_type, tokens));
  const auto out = std::make_shared<std::vector<float>>(kRows * kMostTokens);
  std::vector<float> want(kRows * kMostTokens);
  run_dot(kernel, lines_of(kernel.weight_type, rows).data(), narrow_tokens->data(), kMostTokens, k, out->data());
  run_dot(kDotPortable[0], rows.data(), tokens.data(), kMostTokens, k, want.data());
  // Each of the two adds k products of at most 1, eight sums at a time: see kernels_test.cc.
  const double bound = 2 * (static_cast<double>(k) / 8 + 6) * 0x1p-24 * static_cast<double>(k);
  for (size_t i = 0; i < want.size(); ++i)
    REQUIRE(std::fabs((*out)[i] - want[i]) <= bound, "%s: %g, portable %g", kernel.name, (*out)[i], want[i]);
  return [=](const char* block, int n) { run_dot(kernel, block, narrow_tokens->data(), n, k, out->data()); };
}

// Tokens in panels, for each number of them that is timed.
struct Panels {
  Panels(const TileKernel& kernel, const std::vector<float>& tokens, int n, int64_t k) {
    const int64_t bytes = kernel.panel_bytes(k, kPanelTokens);
    lines.resize(static_cast<size_t>((n + kPanelTokens - 1) / kPanelTokens * bytes) / sizeof(Line));
    for (int t = 0; t < n; t += kPanelTokens) {
      const float* token[kPanelTokens];
      const int count = std::min(kPanelTokens, n - t);
      for (int i = 0; i < count; ++i) token[i] = &tokens[static_cast<size_t>((t + i) * k)];
      at.push_back(lines[0].bytes + t / kPanelTokens * bytes);
      kernel.pack(token, nullptr, count, k, const_cast<void*>(at.back()));
    }
  }
  Lines lines;
  std::vector<const void*> at;
};

int64_t tile_row_bytes(const TileKernel& kernel, int64_t k) {
  return kernel.terms > 0 ? k * 2 : kernel.unpack != nullptr ? k / 2 : k;
}

Product::Run prepare_tile(const TileKernel& kernel, int64_t k) {
  const std::vector<float> rows = random_values(kRowsOfTiles * k), tokens = random_values(kMostTokens * k);
  const Lines narrow_rows = lines_of(DataType::kBFloat16, rows);  // for int8, any bytes
  std::map<int, std::shared_ptr<Panels>> panels;
  for (const int n : kTokens) panels[n] = std::make_shared<Panels>(kernel, tokens, n, k);
  const auto scales = std::make_shared<std::vector<float>>(kRowsOfTiles * k / kUnit, 0.125f);
  const auto unpacked = std::make_shared<Lines>(kRowsOfTiles * k / sizeof(Line));
  const auto run = [=](const TileKernel& by, const Panels& of, const void* block, int n, float* out) {
    const int64_t bytes = tile_row_bytes(by, k);
    TileRows parts[2] = {{block, bytes, kRowsOfTiles, scales->data(), nullptr}, {}};
    if (by.unpack != nullptr) {
      const void* row[kRowsOfTiles];
      for (int r = 0; r < kRowsOfTiles; ++r) row[r] = static_cast<const char*>(block) + r * bytes;
      by.unpack(row, kRowsOfTiles, bytes, k, true, unpacked->data(), k);
      parts[0].first = unpacked->data(), parts[0].stride = k;
    }
    by.multiply(parts, of.at.data(), n, k, out);
  };
  const auto out = std::make_shared<std::vector<float>>(kRowsOfTiles * kMostTokens);
  std::vector<float> want(out->size());
  run(kernel, *panels[kMostTokens], narrow_rows.data(), kMostTokens, out->data());
  const TileKernel& portable =
      kernel.terms > 0 ? kTileBf16Portable[kernel.terms - 1] : kTileInt8Portable[static_cast<int>(kernel.format) - 1];
  run(portable, Panels(portable, tokens, kMostTokens, k), narrow_rows.data(), kMostTokens, want.data());
  REQUIRE(*out == want, "%s differs from %s", kernel.name, portable.name);
  return [=](const char* block, int n) { run(kernel, *panels.at(n), block, n, out->data()); };
}

// Other families of products (quantised rows) join here.
std::vector<Product> products(const Ceilings& ceilings) {
  std::vector<Product> all;
  for (const DotKernel& kernel : dot_kernels()) {
    const double flops = kernel.token_type == DataType::kFloat32 ? ceilings.flops[static_cast<int>(kernel.isa)]
                                                                 : ceilings.flops_bfloat16;
    all.push_back({kernel.name, kernel.isa, kRows, flops, [=](int64_t k) { return k * size_of(kernel.weight_type); },
                   [=](int64_t k) { return prepare_dot(kernel, k); }});
  }
  for (const TileKernel& kernel : tile_kernels()) {
    if (!amx_status().usable) continue;
    // A product of tiles takes as long with int8, and has twice as many values.
    const double flops = kernel.terms > 0 ? ceilings.tiles_bfloat16 / kernel.terms : ceilings.tiles_bfloat16 * 2;
    all.push_back({kernel.name, kernel.isa, kRowsOfTiles, flops, [=](int64_t k) { return tile_row_bytes(kernel, k); },
                   [=](int64_t k) { return prepare_tile(kernel, k); }});
  }
  return all;
}

void time_product(const Product& product, const char* memory, double read) {
  for (const int64_t k : kDepths) {
    const Product::Run run = product.prepare(k);
    const int64_t block = product.rows * product.row_bytes(k), blocks = kBurst / block;
    std::printf("%-22s k=%-4ld L2    ", product.name, static_cast<long>(k));
    for (const int n : kTokens) {
      const double rate = 2.0 * product.rows * static_cast<double>(k * n) / time_of([&] { run(memory, n); });
      std::printf(" %2d: %5.1f (%3.0f %%)", n, rate * 1e-9, 100 * rate / product.flops);
    }
    std::printf("\n%-22s %-6s memory", "", "");
    int64_t at = 0;
    const auto burst = [&](int n) {
      for (int64_t b = 0; b < blocks; ++b) {
        run(memory + at, n);
        at = at + 2 * block <= kMemory ? at + block : 0;
      }
    };
    for (const int n : kTokens) {
      const double seconds = time_of([&] { burst(n); }, false);
      const double bytes = static_cast<double>(blocks * block);
      const double flops = 2.0 * product.rows * static_cast<double>(k * n * blocks);
      const double bound = std::max(bytes / read, flops / product.flops);
      std::printf(" %2d: %5.1f (%3.0f %%)", n, bytes / seconds * 1e-9, 100 * bound / seconds);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

// --- elementwise kernels: billions of values per second, in the L1 and L2 caches ---

constexpr int64_t kValues = 8192;

void report(const char* name, const char* what, const std::function<void()>& run) {
  std::printf("%-26s %-8s %6.2f\n", name, what, static_cast<double>(kValues) / time_of(run) * 1e-9);
}

void time_conversions(const std::function<bool(const char*, Isa)>& wanted) {
  std::vector<unsigned char> bytes(kValues * 4);
  std::mt19937 random(1);
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = i % 2 == 1 ? 0x3c : static_cast<unsigned char>(random());  // finite
  std::vector<float> wide(kValues), want(kValues), scales(kValues, 0.125f), zero_points(kValues, 8.0f);
  const auto agree = [&](const char* name) {
    REQUIRE(std::memcmp(wide.data(), want.data(), kValues * 4) == 0, "%s differs from portable", name);
  };
  for (const ConvertKernel& kernel : convert_kernels()) {
    if (!wanted(kernel.name, kernel.isa)) continue;
    select_kernels(Isa::kPortable).widen[static_cast<int>(kernel.type)](bytes.data(), want.data(), kValues);
    kernel.widen(bytes.data(), wide.data(), kValues);
    agree(kernel.name);
    report(kernel.name, "widen", [&] { kernel.widen(bytes.data(), wide.data(), kValues); });
    if (kernel.narrow == nullptr) continue;
    std::vector<char> narrow(kValues * 4);
    report(kernel.name, "narrow", [&] { kernel.narrow(wide.data(), narrow.data(), kValues); });
  }
  for (const DequantiseKernel& kernel : dequantise_kernels()) {
    if (!wanted(kernel.name, kernel.isa)) continue;
    const auto run = [&](DequantiseFn fn, float* out) {
      fn(bytes.data(), kValues, kUnit, scales.data(), zero_points.data(), out);
    };
    run(select_kernels(Isa::kPortable).dequantise[static_cast<int>(kernel.format)], want.data());
    run(kernel.fn, wide.data());
    agree(kernel.name);
    report(kernel.name, "", [&] { run(kernel.fn, wide.data()); });
  }
}

void time_activations(const std::function<bool(const char*, Isa)>& wanted) {
  const ActivationParams params{1.0f, 0.0f, 1e30f};
  const std::vector<float> gate = random_values(kValues), up = random_values(kValues);
  std::vector<float> out(kValues), want(kValues);
  for (const ActivationKernel& kernel : activation_kernels()) {
    if (!wanted(kernel.name, kernel.isa)) continue;
    const auto run = [&](ActivationFn fn, float* to) { fn(params, gate.data(), up.data(), to, kValues); };
    run(select_kernels(Isa::kPortable).activation[static_cast<int>(kernel.activation)], want.data());
    run(kernel.fn, out.data());
    for (size_t i = 0; i < out.size(); ++i)  // of factors of at most 1: about ten roundings in each of the two
      REQUIRE(std::fabs(out[i] - want[i]) <= 20 * 0x1p-24, "%s: %g, portable %g", kernel.name, out[i], want[i]);
    report(kernel.name, "", [&] { run(kernel.fn, out.data()); });
  }
}

// --- routers: nanoseconds of a token, portable ones too ---

// Of n experts the k best by softmax. Many rows, so that branches cannot be learnt.
void time_routes(const std::string& filter) {
  constexpr int64_t kExperts[] = {8, 32, 64, 128, 256, 512}, kChosen[] = {2, 6, 8, 12, 22}, kTokens = 512;
  const auto per_token = [&](const std::function<void(int64_t token)>& run) {
    const auto all = [&] {
      for (int64_t t = 0; t < kTokens; ++t) run(t);
    };
    return time_of(all) / kTokens * 1e9;
  };
  for (const RouteKernel& kernel : route_kernels()) {
    if (kernel.isa > cpu_features().newest || std::string(kernel.name).find(filter) == std::string::npos) continue;
    for (const int64_t n : kExperts) {
      std::mt19937 random(static_cast<unsigned>(n));
      std::normal_distribution<float> normal;
      std::vector<float> logits(static_cast<size_t>(kTokens * n)), scores(logits.size());
      for (float& logit : logits) logit = normal(random);
      const auto softmax = [&](int64_t t) { kernel.softmax(&logits[t * n], &scores[t * n], n); };
      const auto sigmoid = [&](int64_t t) { kernel.sigmoid(&logits[t * n], &scores[t * n], n); };
      const double sigmoid_ns = per_token(sigmoid), softmax_ns = per_token(softmax);  // in this order: top_k reads it
      std::printf("%-15s n=%-3ld sigmoid %5.0f softmax %5.0f top_k", kernel.name, static_cast<long>(n), sigmoid_ns,
                  softmax_ns);
      for (const int64_t k : kChosen) {
        if (k > n) continue;
        int32_t ids[512], want[512];
        const auto top_k = [&](int64_t t) { kernel.top_k(&scores[t * n], n, k, false, ids); };
        for (int64_t t = 0; t < kTokens; ++t) {
          top_k(t);
          kRoutePortable[0].top_k(&scores[t * n], n, k, false, want);
          REQUIRE(std::equal(ids, ids + k, want), "%s chooses other experts than portable", kernel.name);
        }
        std::printf(" %2ld: %4.0f", static_cast<long>(k), per_token(top_k));
      }
      std::printf("\n");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  // Portable kernels are the yardstick of correctness, not of speed.
  const auto wanted = [&](const char* name, Isa isa) {
    return isa > Isa::kPortable && isa <= cpu_features().newest && std::string(name).find(filter) != std::string::npos;
  };
  auto* memory = static_cast<char*>(mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  REQUIRE(memory != MAP_FAILED, "no memory for %ld bytes of rows", static_cast<long>(kMemory));
  madvise(memory, kMemory, MADV_NOHUGEPAGE);  // as the pages of a mapped model file
  for (int64_t i = 0; i < kMemory; i += 2) memory[i] = static_cast<char>(i >> 7), memory[i + 1] = 0x3c;  // finite
  const Ceilings ceilings = measure_ceilings(memory);
  std::printf("products, by tokens: GFLOP/s (of the peak) in L2; GB/s of rows (of the bound) from memory\n");
  for (const Product& product : products(ceilings))
    if (wanted(product.name, product.isa)) time_product(product, memory, ceilings.read);
  std::printf("elementwise: billions of values per second\n");
  time_conversions(wanted);
  time_activations(wanted);
  std::printf("router, by k: nanoseconds of a token\n");
  time_routes(filter);
}
