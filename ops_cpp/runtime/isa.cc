#include "runtime/isa.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "runtime/amx.h"

namespace hina {
namespace {

// Each ISA has what those before it have, and these features.
struct IsaNeeds {
  const char* name;
  const char* needs[4];
};
constexpr IsaNeeds kIsas[kIsaCount] = {
    {"portable", {}},
    {"avx2", {"avx2", "fma", "f16c"}},
    {"avx512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}},
    {"avx512_vnni", {"avx512_vnni"}},
    {"avx512_bf16", {"avx512_bf16"}},
};

// The word of HINA_ISA that is newer than all of them: AMX beside the preferred one.
constexpr const char* kAmx = "amx";

// Chosen unless HINA_ISA names a newer one. BF16 is not: where it was measured (Emerald Rapids), VDPBF16PS multiplies
// at half the rate of FMA, and it rounds what the second projection reads.
constexpr Isa kPreferred = Isa::kAvx512Vnni;

// The first feature that the CPU lacks for `isa`, or nullptr.
const char* lacks(const CpuFeatures& cpu, const IsaNeeds& isa) {
  for (const char* need : isa.needs)
    if (need != nullptr && std::find(cpu.names.begin(), cpu.names.end(), need) == cpu.names.end()) return need;
  return nullptr;
}

#if defined(__x86_64__)

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Leaf cpuid(unsigned leaf, unsigned subleaf = 0) {
  Leaf r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
  return r;
}

unsigned long long xcr0() {
  unsigned lo = 0, hi = 0;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (static_cast<unsigned long long>(hi) << 32) | lo;
}

std::string trimmed(const char* text, size_t n) {
  std::string s(text, strnlen(text, n));
  const size_t first = s.find_first_not_of(' ');
  const size_t last = s.find_last_not_of(' ');
  return first == std::string::npos ? std::string() : s.substr(first, last - first + 1);
}

CpuFeatures read_cpu() {
  CpuFeatures cpu;
  const Leaf l0 = cpuid(0);
  char vendor[12];
  std::memcpy(vendor, &l0.b, 4);
  std::memcpy(vendor + 4, &l0.d, 4);
  std::memcpy(vendor + 8, &l0.c, 4);
  cpu.vendor = trimmed(vendor, sizeof vendor);
  if (cpuid(0x80000000u).a >= 0x80000004u) {
    char brand[48];
    for (unsigned i = 0; i < 3; ++i) {
      const Leaf l = cpuid(0x80000002u + i);
      std::memcpy(brand + 16 * i, &l, 16);
    }
    cpu.model = trimmed(brand, sizeof brand);
  }
  const Leaf l1 = cpuid(1);
  const Leaf l7 = l0.a >= 7 ? cpuid(7) : Leaf{};
  const Leaf l7_1 = l0.a >= 7 && l7.a >= 1 ? cpuid(7, 1) : Leaf{};
  const unsigned long long state = (l1.c >> 27) & 1 ? xcr0() : 0;
  const bool ymm = (state & 0x6) == 0x6;
  const bool zmm = ymm && (state & 0xe0) == 0xe0;
  const bool tiles = (state & 0x60000) == 0x60000;
  const struct {
    const char* name;
    unsigned reg;
    int bit;
    bool usable;
  } table[] = {
      {"avx", l1.c, 28, ymm},         {"fma", l1.c, 12, ymm},          {"f16c", l1.c, 29, ymm},
      {"avx2", l7.b, 5, ymm},         {"avx_vnni", l7_1.a, 4, ymm},    {"avx512f", l7.b, 16, zmm},
      {"avx512dq", l7.b, 17, zmm},    {"avx512bw", l7.b, 30, zmm},     {"avx512vl", l7.b, 31, zmm},
      {"avx512_vnni", l7.c, 11, zmm}, {"avx512_bf16", l7_1.a, 5, zmm}, {"avx512_fp16", l7.d, 23, zmm},
      {"amx_tile", l7.d, 24, tiles},  {"amx_bf16", l7.d, 22, tiles},   {"amx_int8", l7.d, 25, tiles},
  };
  for (const auto& f : table) {
    const bool has = (f.reg >> f.bit) & 1;
    if (has && f.usable) cpu.names.emplace_back(f.name);
    if (!has && cpu.amx_lacks.empty() && std::strncmp(f.name, "amx_", 4) == 0) cpu.amx_lacks = f.name;
  }
  cpu.tiles = tiles;
  for (int i = 1; i < kIsaCount && lacks(cpu, kIsas[i]) == nullptr; ++i) cpu.newest = static_cast<Isa>(i);
  return cpu;
}

#else

CpuFeatures read_cpu() { return {}; }

#endif

}  // namespace

const char* isa_name(Isa isa) { return kIsas[static_cast<int>(isa)].name; }

const CpuFeatures& cpu_features() {
  static const CpuFeatures cpu = read_cpu();
  return cpu;
}

std::string choice_text(const IsaChoice& choice) {
  const std::string name = isa_name(choice.isa);
  if (choice.amx) return name + " with amx because " + choice.reason + "; " + choice.amx_reason;
  return name + " because " + choice.reason + "; no amx because " + choice.amx_reason;
}

IsaChoice choose_isa() {
  IsaChoice choice;
  const Isa newest = cpu_features().newest;
  choice.isa = std::min(newest, kPreferred);
  choice.reason = choice.isa == newest
                      ? std::string("the CPU lacks ") + lacks(cpu_features(), kIsas[static_cast<int>(newest) + 1])
                      : std::string("it is the fastest measured; the CPU has ") + isa_name(newest);
  const char* cap = std::getenv("HINA_ISA");
  choice.cap = cap == nullptr ? "" : cap;
  const bool capped = !choice.cap.empty() && choice.cap != kAmx;
  choice.amx = !capped && amx_status().usable;
  choice.amx_reason = capped ? "HINA_ISA=" + choice.cap + " caps the choice" : amx_status().reason;
  if (choice.cap.empty()) return choice;
  if (choice.cap == kAmx) {
    choice.reason += " and HINA_ISA=amx allows it";
    if (!choice.amx)
      choice.error = "HINA_ISA is 'amx', but " + choice.amx_reason + ": unset HINA_ISA, or set it to " +
                     isa_name(choice.isa) + " or an older one";
    return choice;
  }
  for (int i = 0; i < kIsaCount; ++i) {
    if (choice.cap != kIsas[i].name) continue;
    const Isa isa = static_cast<Isa>(i);
    if (isa < choice.isa || (isa > choice.isa && choice.isa < newest)) {
      choice.reason = "HINA_ISA=" + choice.cap + (isa < choice.isa ? " caps the choice" : " asks for it");
      choice.isa = std::min(isa, newest);
    } else {
      choice.reason += " and HINA_ISA=" + choice.cap + " allows it";
    }
    return choice;
  }
  choice.error = "HINA_ISA is '" + choice.cap + "', expected one of:";
  for (const IsaNeeds& isa : kIsas) choice.error += std::string(" ") + isa.name;
  choice.error += std::string(" ") + kAmx;
  return choice;
}

}  // namespace hina
