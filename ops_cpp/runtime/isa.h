// Which instruction set this process uses: CPUID and XCR0 say what there is, HINA_ISA caps the choice.
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
};

struct IsaChoice {
  Isa isa = Isa::kPortable;
  std::string reason;  // one clause for people: why this one
  std::string cap;     // HINA_ISA, empty when not set
  std::string error;   // not empty when HINA_ISA names no known ISA; `isa` is then meaningless
};

const char* isa_name(Isa isa);

// Read once from the CPU.
const CpuFeatures& cpu_features();

// Reads HINA_ISA at every call, so that each session is created under the cap of its time.
IsaChoice choose_isa();

}  // namespace hina
