// Which instruction set this process uses: CPUID and XCR0 say what there is, HINA_ISA caps the choice. AMX comes beside
// any vector instruction set.
#pragma once

#include <string>
#include <vector>

#include "kernels/types.h"

namespace hina {

struct CpuFeatures {
  std::string vendor;
  std::string model;
  std::vector<std::string> names;  // features that CPU and operating system both offer, as /proc/cpuinfo spells them
  Isa newest = Isa::kPortable;     // the newest instruction set that the kernels know and this CPU has
  std::string amx_lacks;           // the first feature for AMX that the CPU has not, whatever the operating system does
  bool tiles = false;              // the operating system keeps the tiles of a thread (XCR0)
};

struct IsaChoice {
  Isa isa = Isa::kPortable;
  std::string reason;  // one clause for people: why this one
  std::string cap;     // HINA_ISA, empty when not set
  bool amx = false;
  std::string amx_reason;
  std::string error;  // not empty when HINA_ISA names no known ISA, or AMX that cannot be used: nothing is chosen then
};

const char* isa_name(Isa isa);

// "avx512_vnni with amx because ...", or "avx2 because ...; no amx because ...".
std::string choice_text(const IsaChoice& choice);

// Read once from the CPU.
const CpuFeatures& cpu_features();

// Reads HINA_ISA at every call, so that each session is created under the cap of its time.
IsaChoice choose_isa();

}  // namespace hina
