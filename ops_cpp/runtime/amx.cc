#include "runtime/amx.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "kernels/tile/amx.h"
#include "runtime/isa.h"

namespace hina {

#if defined(__x86_64__)
namespace {

// Set by the emulator of tests/ops_cpp/amx in the process that it is loaded into. It answers the request below itself;
// where the variable is set without an emulator, the kernel does.
constexpr const char* kEmulator = "HINA_AMX_EMULATOR";

// Linux, Documentation/arch/x86/xstate.rst.
constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr long kTileData = 18;               // XFEATURE_XTILEDATA

AmxStatus ask() {
  const CpuFeatures& cpu = cpu_features();
  const char* emulator = std::getenv(kEmulator);
  const bool emulated = emulator != nullptr && *emulator != '\0';
  if (!emulated && !cpu.amx_lacks.empty()) return {false, "the CPU lacks " + cpu.amx_lacks};
  if (!emulated && !cpu.tiles) return {false, "the kernel does not keep tiles (bits 17 and 18 of XCR0 are not set)"};
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    const char* why = errno == ENOSPC ? "the alternate signal stack of a thread is too small" : std::strerror(errno);
    return {false, std::string("the kernel refused permission for tiles (ARCH_REQ_XCOMP_PERM: ") + why + ")"};
  }
  return {true, emulated ? "AMX is emulated" : "the CPU has AMX and the kernel permits it"};
}

}  // namespace

const AmxStatus& amx_status() {
  static const AmxStatus status = ask();
  return status;
}

static_assert(sizeof(amx::Config) == 64);

TileState::TileState(bool amx) : amx_(amx) {
  if (!amx_) return;
  amx::Config config;
  amx::store_configuration(config);
  std::memcpy(before_, &config, sizeof before_);
}

TileState::~TileState() {
  if (!amx_) return;
  amx::Config config;
  std::memcpy(&config, before_, sizeof before_);
  if (config.palette == 0)
    amx::release();
  else
    amx::configure(config);
}

#else

const AmxStatus& amx_status() {
  static const AmxStatus status{false, "only x86-64 CPUs have it"};
  return status;
}

TileState::TileState(bool) : amx_(false) {}
TileState::~TileState() = default;

#endif

}  // namespace hina
