// What AMX does, on whatever provides it: this CPU or the emulator. Products of random tiles against the reference,
// addresses, faults, threads, and the registers that an emulated instruction must leave alone. Argument: how many
// random tiles for each kind of product. Ends with 0 when all is right, 77 when the kernel refuses permission.
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/tile/amx.h"
#include "reference.h"

namespace {

using hina::amx::Config;
using reference::Tile;
namespace amx = hina::amx;

int failures = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("wrong: %s\n", what.c_str());
}

// --- products ---

enum class Values { kPlain, kNoNan, kAny };  // of bfloat16: ordinary, with infinities and subnormals, all bits

struct Product {
  const char* name;
  bool floats;
  void (*run)();  // tile 0 += tile 1 x tile 2
  void (*reference)(Tile&, const Tile&, const Tile&);
};

const Product kProducts[] = {
    {"tdpbf16ps", true, amx::multiply_bf16<0, 1, 2>, reference::tdpbf16ps},
    {"tdpbssd", false, amx::multiply_signed<0, 1, 2>, reference::tdpb<int8_t, int8_t>},
    {"tdpbsud", false, [] { __asm__ volatile("tdpbsud %tmm2, %tmm1, %tmm0"); }, reference::tdpb<int8_t, uint8_t>},
    {"tdpbusd", false, amx::multiply_unsigned<0, 1, 2>, reference::tdpb<uint8_t, int8_t>},
    {"tdpbuud", false, [] { __asm__ volatile("tdpbuud %tmm2, %tmm1, %tmm0"); }, reference::tdpb<uint8_t, uint8_t>},
};

using Random = std::mt19937_64;

uint16_t random_bfloat16(Random& random, Values values) {
  if (values == Values::kPlain)
    return static_cast<uint16_t>(reference::bits(static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 257) >>
                                 16);
  uint16_t half = static_cast<uint16_t>(random());
  if (values == Values::kAny) return half;
  const bool special = (half & 0x7f80) == 0x7f80;
  if (special) half &= random() % 2 ? 0xff80 : 0xbfff;  // infinity, or a number
  return random() % 8 == 0 ? half & 0x807f : half;      // subnormal
}

Tile random_tile(Random& random, int rows, int dwords, bool floats, Values values) {
  Tile tile{rows, 4 * dwords};
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < 2 * dwords; ++i)
      tile.set(r, i, floats ? random_bfloat16(random, values) : static_cast<uint16_t>(random()));
  return tile;
}

// The same bits; which NaN it is, is not specified.
bool same(const Tile& a, const Tile& b, bool floats) {
  for (int r = 0; r < 16; ++r)
    for (int i = 0; i < 16; ++i) {
      const bool nan = floats && std::isnan(a.get<float>(r, i)) && std::isnan(b.get<float>(r, i));
      if (!nan && a.get<uint32_t>(r, i) != b.get<uint32_t>(r, i)) return false;
    }
  return true;
}

// Random sizes, the first time full ones; the sums are stored among bytes that must stay as they are.
void check_product(const Product& product, Values values, int number, Random& random) {
  const auto size = [&] { return number == 0 ? 16 : 1 + static_cast<int>(random() % 16); };
  const int m = size(), k = size(), n = size();
  const Tile left = random_tile(random, m, k, product.floats, values);
  const Tile right = random_tile(random, k, n, product.floats, values);
  Tile sums = random_tile(random, m, n, product.floats, values);
  Config config;
  config.shape(0, m, 4 * n);
  config.shape(1, m, 4 * k);
  config.shape(2, k, 4 * n);
  amx::configure(config);
  Config stored;
  amx::store_configuration(stored);
  expect(std::memcmp(&config, &stored, sizeof config) == 0, "configuration");
  amx::load<0>(sums.bytes, 64);
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm1" : : "r"(left.bytes), "r"(64L) : "memory");
  amx::load<2>(right.bytes, 64);
  product.run();
  product.reference(sums, left, right);
  constexpr int kStride = 200, kMargin = 0x5a;
  uint8_t memory[16 * kStride];
  std::memset(memory, kMargin, sizeof memory);
  amx::store<0>(memory, kStride);
  amx::release();
  Tile got{m, 4 * n};
  for (int r = 0; r < 16; ++r)
    for (int i = 0; i < kStride; ++i) {
      const uint8_t byte = memory[r * kStride + i];
      if (r < m && i < 4 * n)
        got.bytes[r][i] = byte;
      else
        expect(byte == kMargin, "bytes beside a stored tile");
    }
  expect(same(got, sums, product.floats), std::string(product.name) + " of random tiles");
}

void check_products(int rounds) {
  Random random(1);
  for (const Product& product : kProducts)
    for (const Values values : {Values::kPlain, Values::kNoNan, Values::kAny})
      for (int number = 0; number < rounds; ++number)
        if (product.floats || values == Values::kAny) check_product(product, values, number, random);
}

// --- addresses ---

Config full_tiles() {
  Config config;
  for (int tile = 0; tile < 8; ++tile) config.shape(tile, 16, 64);
  return config;
}

alignas(64) Config at_an_absolute_address = full_tiles();

void check_addresses() {
  static uint8_t memory[64 * 64];
  Random random(2);
  for (uint8_t& byte : memory) byte = static_cast<uint8_t>(random());
  uint8_t stored[16][64];
  const auto rows = [&](const uint8_t* first, int64_t stride) {
    bool good = true;
    for (int r = 0; r < 16; ++r) good = good && std::memcmp(stored[r], first + r * stride, 64) == 0;
    return good;
  };
  __asm__ volatile("ldtilecfg %0" : : "m"(at_an_absolute_address) : "memory");  // relative to the instruction
  register int64_t base __asm__("r13") = reinterpret_cast<int64_t>(memory) - 4096;
  register int64_t index __asm__("r14") = 32;
  __asm__ volatile("tileloadd 4160(%0,%1,4), %%tmm6" : : "r"(base), "r"(index) : "memory");
  amx::store<6>(stored, 64);
  expect(rows(memory + 64, 128), "base + scaled index + displacement, of the newer registers");
  amx::load<7>(memory + 15 * 64, -64);
  amx::store<7>(stored, 64);
  expect(rows(memory + 15 * 64, -64), "a negative stride");
  __asm__ volatile("tileloadd 8(%0), %%tmm5" : : "r"(memory) : "memory");
  amx::store<5>(stored, 64);
  expect(rows(memory + 8, 0), "no stride");

  Config part = full_tiles();
  part.start_row = 13;  // as after a fault in row 13
  amx::configure(part);
  amx::load<0>(memory, 64);
  Config after;
  amx::store_configuration(after);
  expect(after.start_row == 0, "start_row after a load");
  amx::store<0>(stored, 64);
  for (int r = 0; r < 16; ++r)
    for (int i = 0; i < 64; ++i) expect(stored[r][i] == (r < 13 ? 0 : memory[64 * r + i]), "a load from start_row on");
  amx::configure(full_tiles());
  amx::store<0>(stored, 64);
  for (const auto& row : stored)
    for (const uint8_t byte : row) expect(byte == 0, "LDTILECFG clears the tiles");
  amx::release();
  amx::store_configuration(after);
  const Config none{.palette = 0};
  expect(std::memcmp(&after, &none, sizeof none) == 0, "TILERELEASE clears the configuration");
}

// --- faults ---

sigjmp_buf jump;

void on_fault(int number) { siglongjmp(jump, number); }

// The signal that `run` raises, 0 for none.
int signal_of(const std::function<void()>& run) {
  struct sigaction action = {}, illegal, segment;
  action.sa_handler = on_fault;
  sigaction(SIGILL, &action, &illegal);
  sigaction(SIGSEGV, &action, &segment);
  const int number = sigsetjmp(jump, 1);
  if (number == 0) run();
  amx::release();
  sigaction(SIGILL, &illegal, nullptr);
  sigaction(SIGSEGV, &segment, nullptr);
  return number;
}

void check_faults() {
  static uint8_t memory[16 * 64];
  // Changes full tiles, and runs an instruction.
  const auto with = [](const std::function<void(Config&)>& change, const std::function<void()>& run) {
    Config config = full_tiles();
    change(config);
    return signal_of([&] {
      amx::configure(config);
      run();
    });
  };
  const auto nothing = [] {};
  const auto product = [] { amx::multiply_bf16<0, 1, 2>(); };
  const struct {
    const char* what;
    int signal, expected;
  } cases[] = {
      {"no fault", with([](Config&) {}, product), 0},
      {"palette 2", with([](Config& c) { c.palette = 2; }, nothing), SIGSEGV},
      {"a reserved byte", with([](Config& c) { c.reserved[13] = 1; }, nothing), SIGSEGV},
      {"17 rows", with([](Config& c) { c.shape(3, 17, 64); }, nothing), SIGSEGV},
      {"65 bytes", with([](Config& c) { c.shape(3, 16, 65); }, nothing), SIGSEGV},
      {"no bytes in 4 rows", with([](Config& c) { c.shape(3, 4, 0); }, nothing), SIGSEGV},
      {"no rows of 4 bytes", with([](Config& c) { c.shape(3, 0, 4); }, nothing), SIGSEGV},
      {"a ninth tile", with([](Config& c) { c.shape(8, 16, 64); }, nothing), SIGSEGV},
      {"a load without configuration", signal_of([] { amx::load<0>(memory, 64); }), SIGILL},
      {"a store without configuration", signal_of([] { amx::store<0>(memory, 64); }), SIGILL},
      {"zeros without configuration", signal_of(amx::zero<0>), SIGILL},
      {"a product without configuration", signal_of(product), SIGILL},
      {"a load of palette 0", with([](Config& c) { c.palette = 0; }, [] { amx::load<0>(memory, 64); }), SIGILL},
      {"a tile without rows", with([](Config& c) { c.shape(3, 0, 0); }, [] { amx::zero<3>(); }), SIGILL},
      {"operands of 15 and 16 rows", with([](Config& c) { c.shape(1, 15, 64); }, product), SIGILL},
      {"15 groups and 16 rows", with([](Config& c) { c.shape(1, 16, 60); }, product), SIGILL},
      {"15 and 16 columns", with([](Config& c) { c.shape(2, 16, 60); }, product), SIGILL},
      {"groups of 3 bytes", with([](Config& c) { c.shape(1, 16, 63); }, product), SIGILL},
      {"a tile times itself", with([](Config&) {}, [] { __asm__ volatile(".byte 0xc4, 0xe2, 0x72, 0x5c, 0xc1"); }),
       SIGILL},
      {"start_row 3 and a product", with([](Config& c) { c.start_row = 3; }, product), 0},
      {"start_row 16 and zeros", with([](Config& c) { c.start_row = 16; }, amx::zero<0>), 0},
      {"start_row 16 and a load", with([](Config& c) { c.start_row = 16; }, [] { amx::load<0>(memory, 64); }), SIGILL},
      {"start_row 16 and a store", with([](Config& c) { c.start_row = 16; }, [] { amx::store<0>(memory, 64); }),
       SIGILL},
  };
  for (const auto& one : cases)
    expect(one.signal == one.expected, std::string(one.what) + ": signal " + std::to_string(one.signal));
}

// --- threads ---

// Each thread has tiles of its own; all run through the same instructions at the same time.
void check_threads() {
  const auto work = [](int number) {
    Config config;
    config.shape(0, 1 + number, 64);
    amx::configure(config);
    uint8_t mine[16][64], stored[16][64] = {};
    std::memset(mine, number + 1, sizeof mine);
    amx::load<0>(mine, 64);
    bool good = true;
    for (int round = 0; round < 200; ++round) {
      std::this_thread::yield();
      amx::store<0>(stored, 64);
      for (int r = 0; r < 16; ++r) good = good && stored[r][63] == (r <= number ? number + 1 : 0);
    }
    expect(good, "tiles of a thread");
    amx::release();
  };
  std::vector<std::thread> threads;
  for (int number = 0; number < 8; ++number) threads.emplace_back(work, number);
  for (std::thread& thread : threads) thread.join();
}

// --- what else a thread has ---

// Fills general registers, the vector registers of AVX, the carry flag and the red zone, executes TILEZERO, stores the
// vector registers and returns 0 if the rest is as it was.
__attribute__((noinline, naked)) int disturbed(const void* pattern, void* stored) {
  (void)pattern, (void)stored;
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define FILL(n) "vmovups 32*" #n "(%rdi), %ymm" #n "\n"
#define STORE(n) "vmovups %ymm" #n ", 32*" #n "(%rsi)\n"
  __asm__ volatile(EACH(
      FILL) "movabs $0x1122334455667788, %r8\n"
            "mov %r8, %r9\n mov %r8, %r10\n mov %r8, %r11\n mov %r8, %rcx\n mov %r8, %rdx\n"
            "mov %r8, -8(%rsp)\n mov %r8, -128(%rsp)\n"
            "stc\n"
            "tilezero %tmm0\n"
            "sbb %rax, %rax\n"  // -1 of a carry
            "add $1, %rax\n" EACH(
                STORE) "xor %r8, %r9\n xor %r8, %r10\n xor %r8, %r11\n xor %r8, %rcx\n xor %r8, %rdx\n"
                       "or %r9, %rax\n or %r10, %rax\n or %r11, %rax\n or %rcx, %rax\n or %rdx, %rax\n"
                       "mov -8(%rsp), %r9\n xor %r8, %r9\n or %r9, %rax\n"
                       "mov -128(%rsp), %r9\n xor %r8, %r9\n or %r9, %rax\n"
                       "mov %rax, %rcx\n shr $32, %rcx\n or %ecx, %eax\n"
                       "vzeroupper\n"
                       "ret\n");
}

// The same of the registers that AVX-512 adds.
__attribute__((noinline, naked)) void stored_512(const void* pattern, void* stored) {
  (void)pattern, (void)stored;
  __asm__ volatile(
      "vmovups (%rdi), %zmm3\n vmovups 64(%rdi), %zmm31\n mov $0x5a5a, %eax\n kmovw %eax, %k5\n"
      "tilezero %tmm0\n"
      "vmovups %zmm3, (%rsi)\n vmovups %zmm31, 64(%rsi)\n kmovw %k5, 128(%rsi)\n"
      "vzeroupper\n"
      "ret\n");
}

void check_registers() {
  Random random(3);
  uint8_t pattern[512], stored[512];
  for (uint8_t& byte : pattern) byte = static_cast<uint8_t>(random());
  amx::configure(full_tiles());
  for (int round = 0; round < 3; ++round) {  // the first time by a signal, if emulated
    expect(disturbed(pattern, stored) == 0, "general registers, flags or red zone are disturbed");
    expect(std::memcmp(pattern, stored, sizeof stored) == 0, "vector registers are disturbed");
    if (!__builtin_cpu_supports("avx512f")) continue;
    stored_512(pattern, stored);
    const uint16_t mask = 0x5a5a;
    expect(std::memcmp(pattern, stored, 128) == 0 && std::memcmp(&mask, stored + 128, 2) == 0,
           "AVX-512 registers are disturbed");
  }
  amx::release();
}

}  // namespace

int main(int argc, char** argv) {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    std::perror("no permission for tiles");
    return 77;
  }
  check_products(argc > 1 ? std::atoi(argv[1]) : 100);
  check_addresses();
  check_faults();
  check_threads();
  check_registers();
  std::printf("%s\n", failures == 0 ? "all is right" : "something is wrong");
  return failures == 0 ? 0 : 1;
}
