// The way into the emulator: SIGILL. Functions of the C library that could take the signal away, or ask the kernel
// about AMX, are replaced.
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "emulator.h"

enum { TILE_CONFIGURATION = 17, TILE_DATA = 18 };  // components of the extended state, bits of XCR0

static struct sigaction program;  // what the program wants to do about SIGILL

// --- CPUs that have AMX ---

static bool native;  // LDTILECFG, STTILECFG and TILERELEASE do not trap: they have to be planted, once found
static uint32_t configuration_offset;  // in the frame of a signal

// A configuration that LDTILECFG put into the CPU before it was planted: takes it over, and away from the CPU.
static void import_configuration(ucontext_t* context) {
  enum { MAGIC = 0x46505853, MAGIC_AT = 464, HEADER_AT = 512 };  // linux/asm/sigcontext.h: FP_XSTATE_MAGIC1
  uint8_t* frame = (uint8_t*)context->uc_mcontext.fpregs;
  uint32_t magic;
  memcpy(&magic, frame + MAGIC_AT, sizeof magic);
  uint64_t present;
  memcpy(&present, frame + HEADER_AT, sizeof present);
  if (magic != MAGIC || !(present >> TILE_CONFIGURATION & 1)) return;
  take_configuration(frame + configuration_offset);
  count(LDTILECFG);
  present &= ~(1ull << TILE_CONFIGURATION);
  memcpy(frame + HEADER_AT, &present, sizeof present);
}

// --- the signal ---

// The instruction at `address`, which may be known only from the time before it was patched. Unless it is the first one
// for which the signal is, it is left to its jump then.
static bool instruction_at(const uint8_t* address, bool first, Instruction* instruction) {
  // As long as the first byte is there all are: a thread that patches begins with it.
  if (decode(address, instruction) && *(const volatile uint8_t*)address == VEX) return true;
  return (first || address[0] != JUMP) && find_site(address, instruction);
}

static void pass_on(int number, siginfo_t* info, void* context) {
  if (program.sa_flags & SA_SIGINFO) {
    program.sa_sigaction(number, info, context);
  } else if (program.sa_handler != SIG_DFL && program.sa_handler != SIG_IGN) {
    program.sa_handler(number);
  } else {
    const struct {
      void* handler;
      uint64_t flags;
      void* restorer;
      uint64_t mask;
    } by_default = {SIG_DFL, 0, NULL, 0};  // the kernel's struct sigaction
    syscall(SYS_rt_sigaction, SIGILL, &by_default, NULL, sizeof by_default.mask);
  }
}

static void on_signal(int number, siginfo_t* info, void* frame) {
  // By the numbers of encodings.
  static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  enum { MOST = 64 };  // instructions in a row that share a signal
  ucontext_t* context = frame;
  greg_t* g = context->uc_mcontext.gregs;
  const int saved_errno = errno;
  Outcome outcome = DONE;
  int executed = 0;
  Instruction instruction;
  while (executed < MOST && instruction_at((const uint8_t*)g[REG_RIP], executed == 0, &instruction)) {
    if (native) {
      import_configuration(context);
      plant(instruction.address, false);
    }
    uint64_t registers[16];
    for (int r = 0; r < 16; ++r) registers[r] = (uint64_t)g[order[r]];
    outcome = execute(&instruction, registers);
    if (outcome != DONE) break;
    count((Mnemonic)instruction.mnemonic);
    patch(&instruction);
    g[REG_RIP] += instruction.length;
    ++executed;
  }
  errno = saved_errno;
  if (executed > 0) {
    count_signal();
  } else if (outcome == PROTECTION) {
    raise(SIGSEGV);
  } else {
    pass_on(number, info, frame);
  }
}

// --- functions of the C library ---

typedef int SigactionFunction(int, const struct sigaction*, struct sigaction*);

static int real_sigaction(int number, const struct sigaction* wish, struct sigaction* old) {
  static SigactionFunction* real;
  if (real == NULL) *(void**)&real = dlsym(RTLD_NEXT, "sigaction");
  return real(number, wish, old);
}

EXPORTED int sigaction(int number, const struct sigaction* wish, struct sigaction* old) {
  if (number != SIGILL) return real_sigaction(number, wish, old);
  const struct sigaction before = program;
  if (wish != NULL) program = *wish;
  if (old != NULL) *old = before;
  return 0;
}

EXPORTED sighandler_t signal(int number, sighandler_t handler) {
  const struct sigaction wish = {.sa_handler = handler, .sa_flags = SA_RESTART};
  struct sigaction old;
  return sigaction(number, &wish, &old) == 0 ? old.sa_handler : SIG_ERR;
}

// Changes the mask of blocked signals, SIGILL excepted: the kernel ends a process that blocks the SIGILL it causes.
// Returns 0 or an error number.
static int change_mask(int how, const sigset_t* set, sigset_t* old) {
  enum { KERNEL_MASK_BYTES = 8 };
  sigset_t allowed;
  if (set != NULL && how != SIG_UNBLOCK) {
    allowed = *set;
    sigdelset(&allowed, SIGILL);
    set = &allowed;
  }
  return syscall(SYS_rt_sigprocmask, how, set, old, KERNEL_MASK_BYTES) == 0 ? 0 : errno;
}

EXPORTED int pthread_sigmask(int how, const sigset_t* set, sigset_t* old) {
  const int saved_errno = errno, error = change_mask(how, set, old);
  errno = saved_errno;
  return error;
}

EXPORTED int sigprocmask(int how, const sigset_t* set, sigset_t* old) {
  return change_mask(how, set, old) == 0 ? 0 : -1;
}

// arch_prctl about the extended state (asm/prctl.h): answers for the kernel. False for any other call.
static bool answers(long number, long request, long argument, long* result) {
  enum { GET_SUPPORTED = 0x1021, GET_PERMISSION, REQUEST_PERMISSION };
  static bool granted;
  const uint64_t vectors = 0x2e7, tiles = 1 << TILE_CONFIGURATION | 1 << TILE_DATA;
  if (number != SYS_arch_prctl) return false;
  const bool refused = getenv("AMX_EMULATOR_REFUSE") != NULL;
  *result = 0;
  if (request == REQUEST_PERMISSION && argument == TILE_DATA) {
    granted = !refused;
    if (refused) errno = EPERM, *result = -1;
    return true;
  }
  if (request != GET_SUPPORTED && request != GET_PERMISSION) return false;
  *(uint64_t*)argument = vectors | (request == GET_SUPPORTED || granted ? tiles : 0);
  return true;
}

EXPORTED long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  long result;
  if (answers(number, a[0], a[1], &result)) {
    if (native) plant(__builtin_return_address(0), true);  // who asks is who uses it
    return result;
  }
  register long r10 __asm__("r10") = a[3];
  register long r8 __asm__("r8") = a[4];
  register long r9 __asm__("r9") = a[5];
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  if (result >= 0 || result <= -4096) return result;
  errno = (int)-result;
  return -1;
}

__attribute__((constructor)) static void start(void) {
  start_sites();
  struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK}, before;
  real_sigaction(SIGILL, &action, &before);
  if (program.sa_handler == SIG_DFL) program = before;

  __asm__ volatile("tilerelease" : : : "memory");
  native = amx_emulator_count("signals") == 0;
  amx_emulator_reset();
  unsigned size, unused;
  if (native) __cpuid_count(0xd, TILE_CONFIGURATION, size, configuration_offset, unused, unused);
  setenv("HINA_AMX_EMULATOR", "1", 1);
}
