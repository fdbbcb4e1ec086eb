#include "bench/machine.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "kernels/peak/peak.h"
#include "op/json.h"
#include "runtime/isa.h"

// The newest versions of these two came with glibc 2.34; std::thread asks for them, and the library would load on no
// older system.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_join,pthread_join@GLIBC_2.2.5");
#endif

namespace hina {
namespace {

constexpr int kMostThreadsPerCpu = 4;
constexpr int kReadPasses = 3;  // for each number of streams, after one pass that maps the pages
constexpr int kPeakPasses = 20;
constexpr double kPassSeconds = 0.005;  // of arithmetic: long against the threads' start, short against a time slice

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

// Runs work(thread) on all threads at once, `passes` times; the seconds of the fastest pass, from the first thread's
// start to the last one's end.
template <typename Work>
double fastest(int threads, int passes, const Work& work) {
  std::barrier together(threads);
  std::vector<Clock::time_point> begin(threads), end(threads);
  double best = std::numeric_limits<double>::infinity();
  const auto run = [&](int thread) {
    for (int pass = 0; pass < passes; ++pass) {
      together.arrive_and_wait();
      begin[thread] = Clock::now();
      work(thread);
      end[thread] = Clock::now();
      together.arrive_and_wait();
      if (thread > 0) continue;
      best = std::min(
          best, seconds(*std::max_element(end.begin(), end.end()) - *std::min_element(begin.begin(), begin.end())));
    }
  };
  struct Other {
    pthread_t id;
    const decltype(run)* work;
    int thread;
  };
  std::vector<Other> others(static_cast<size_t>(threads - 1));
  int started = 0;
  for (; started < threads - 1; ++started) {
    Other& other = others[static_cast<size_t>(started)];
    other.work = &run;
    other.thread = started + 1;
    const auto body = [](void* self) -> void* {
      (*static_cast<Other*>(self)->work)(static_cast<Other*>(self)->thread);
      return nullptr;
    };
    if (pthread_create(&other.id, nullptr, body, &other) != 0) break;
  }
  const bool all = started == threads - 1;
  if (all) run(0);
  // Those that there are must not wait for the missing ones.
  for (int missing = all ? 0 : threads - started; missing > 0; --missing) together.arrive_and_drop();
  for (int i = 0; i < started; ++i) pthread_join(others[static_cast<size_t>(i)].id, nullptr);
  if (!all) throw std::runtime_error("the system starts no " + std::to_string(threads) + " threads: ask for fewer");
  return best;
}

// A file mapped as ONNX Runtime maps its weights.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    // O_NONBLOCK: a pipe without a writer must not be waited for; it has no end to seek either.
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const off_t end = file >= 0 ? ::lseek(file, 0, SEEK_END) : -1;
    const bool found = end > 0;
    if (found) {
      size_ = static_cast<size_t>(end);
      data_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    }
    if (file >= 0) ::close(file);
    if (!found || data_ == MAP_FAILED)
      throw std::runtime_error("the file " + path + " cannot be mapped, or is empty: name a file of weights");
  }
  ~MappedFile() { ::munmap(data_, size_); }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const char* data() const { return static_cast<const char*>(data_); }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

typedef uint64_t Words __attribute__((vector_size(16), may_alias));
constexpr size_t kStep = 256;  // bytes of one stream, before the next stream's turn

// The sum of all words of `streams` pieces of `bytes` each, read side by side; `bytes` is a multiple of kStep.
uint64_t read_streams(const char* from, size_t bytes, int streams) {
  constexpr int kWords = kStep / sizeof(Words);
  Words sums[kWords] = {};
  for (size_t at = 0; at < bytes; at += kStep)
    for (int s = 0; s < streams; ++s) {
      const auto* words = reinterpret_cast<const Words*>(from + static_cast<size_t>(s) * bytes + at);
      for (int i = 0; i < kWords; ++i) sums[i] += words[i];
    }
  for (int i = 1; i < kWords; ++i) sums[0] += sums[i];
  return sums[0][0] + sums[0][1];
}

// Bytes per second. A row of a matrix is a stream, and how many streams per thread are fastest depends on the machine.
double read_rate(const std::string& path, int threads) {
  const MappedFile file(path);
  constexpr int kStreams[] = {1, 4, 8};
  const size_t unit = kStep * 8 * static_cast<size_t>(threads);  // divides among all numbers of streams
  const size_t part = file.size() / unit * unit / static_cast<size_t>(threads);
  if (part == 0)
    throw std::runtime_error("the file " + path + " is too small for " + std::to_string(threads) +
                             " threads: name a larger one, or fewer threads");
  std::vector<uint64_t> expected(threads), sums(threads);
  double best = std::numeric_limits<double>::infinity();
  fastest(threads, 1, [&](int thread) { expected[thread] = read_streams(file.data() + thread * part, part, 1); });
  for (const int streams : kStreams) {
    best = std::min(best, fastest(threads, kReadPasses, [&](int thread) {
                      sums[thread] = read_streams(file.data() + thread * part, part / streams, streams);
                    }));
    if (sums != expected) throw std::runtime_error("the file " + path + " changed while it was read");
  }
  return static_cast<double>(part) * threads / best;
}

std::vector<PeakKernel> peak_kernels(Isa isa, bool amx) {
  std::vector<PeakKernel> kernels(std::begin(kPeakPortable), std::end(kPeakPortable));
#ifdef HINA_X86_KERNELS
  const auto add = [&kernels](const auto& table) { kernels.insert(kernels.end(), std::begin(table), std::end(table)); };
  add(kPeakAvx2);
  add(kPeakAvx512);
  add(kPeakAvx512Vnni);
  add(kPeakAvx512Bf16);
  if (amx) add(kPeakAmx);
#endif
  std::erase_if(kernels, [isa](const PeakKernel& kernel) { return kernel.isa > isa; });
  return kernels;
}

// Operations per second of one loop, after proof that it computes what it counts.
double peak_rate(const PeakKernel& kernel, int threads) {
  const auto start = Clock::now();
  const double sum = kernel.sum(kPeakSteps);
  const double once = seconds(Clock::now() - start);
  if (sum != static_cast<double>(kPeakSteps * kernel.multiply_adds * kPeakProduct))
    throw std::runtime_error(std::string("the loop ") + kernel.name + " computed a wrong sum: please report this");
  const int calls = static_cast<int>(std::clamp(kPassSeconds / std::max(once, 1e-9), 1.0, 1e6));
  std::vector<double> sums(threads);
  const double best = fastest(threads, kPeakPasses, [&](int thread) {
    for (int i = 0; i < calls; ++i) sums[thread] += kernel.sum(kPeakSteps);
  });
  return 2.0 * static_cast<double>(kPeakSteps * kernel.multiply_adds) * calls * threads / best;
}

std::string best_rate(const std::vector<PeakKernel>& kernels, PeakType type, int threads) {
  double best = 0;
  for (const PeakKernel& kernel : kernels)
    if (kernel.type == type) best = std::max(best, peak_rate(kernel, threads));
  return best > 0 ? json_number(best) : "null";
}

std::string measure(const std::string& request) {
  const long most = kMostThreadsPerCpu * std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN));
  char* rest = nullptr;
  const long threads = std::strtol(request.c_str(), &rest, 10);
  if (threads < 1 || threads > most || *rest != ' ' || rest[1] == '\0')
    throw std::runtime_error("the request is '" + request + "', expected 1 to " + std::to_string(most) +
                             " threads and a path");
  const IsaChoice choice = choose_isa();
  if (!choice.error.empty()) throw std::runtime_error(choice.error);
  const int n = static_cast<int>(threads);
  const double read = read_rate(rest + 1, n);  // first: it fails at once where there is nothing to read
  const std::vector<PeakKernel> kernels = peak_kernels(choice.isa, choice.amx);
  const std::string float32 = best_rate(kernels, PeakType::kFloat32, n);
  const std::string bfloat16 = best_rate(kernels, PeakType::kBFloat16, n);
  const std::string int8 = best_rate(kernels, PeakType::kInt8, n);
  return "{\"isa\":" + json_string(isa_name(choice.isa)) + ",\"threads\":" + std::to_string(n) +
         ",\"read_bytes_per_second\":" + json_number(read) + ",\"float32_flops\":" + float32 +
         ",\"bfloat16_flops\":" + bfloat16 + ",\"int8_ops\":" + int8 + "}";
}

}  // namespace

std::string machine_json(const std::string& request) {
  try {
    return measure(request);
  } catch (const std::exception& error) {
    return "{\"error\":" + json_string(error.what()) + "}";
  }
}

}  // namespace hina
