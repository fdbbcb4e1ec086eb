/* hide_isa: makes a program believe that its CPU has no AVX-512, AVX-VNNI, AVX10 and AMX.
 *
 *   gcc -O2 -shared -fPIC -o hide_isa.so tools/hide_isa.c
 *   LD_PRELOAD=$PWD/hide_isa.so hina-ort doctor
 *
 * Libraries choose their kernels by CPUID. With CPUID faulting (Linux, x86-64, "cpuid_fault" in /proc/cpuinfo) the
 * instruction raises SIGSEGV; the handler executes it, clears the bits of those features in the answer and steps over
 * it. So hina-ort, ONNX Runtime, torch and the rest all take the kernels that they have for AVX2 machines, and a
 * benchmark is one "as on an AVX2 machine" at this machine's clock and memory. What is not seen: the C library chose
 * its memcpy before this runs, and programs that read /proc/cpuinfo see the true list.
 *
 * Threads inherit the faulting from the thread that starts them; children across exec do not, but they inherit
 * LD_PRELOAD. The program's own handler of SIGSEGV (Python's faulthandler, say) is kept and gets every other fault.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012 /* asm/prctl.h */
#define BIT(n) (1u << (n))

typedef int sigaction_fn(int, const struct sigaction*, struct sigaction*);

static sigaction_fn* real_sigaction;
static struct sigaction program; /* what the program wants to do about SIGSEGV */

/* The answer's registers: eax, ebx, ecx, edx. Bits as in the Intel SDM, volume 2, CPUID. */
static void hide(unsigned leaf, unsigned subleaf, unsigned r[4]) {
  const unsigned xstate = BIT(5) | BIT(6) | BIT(7) | BIT(17) | BIT(18); /* masks, zmm registers, tiles */
  if (leaf == 7 && subleaf == 0) {
    r[1] &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31)); /* F DQ IFMA .. VL */
    r[2] &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14));                    /* VBMI VBMI2 VNNI BITALG VPOPCNTDQ */
    r[3] &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25)); /* .. FP16, AMX */
  } else if (leaf == 7 && subleaf == 1) {
    r[0] &= ~(BIT(4) | BIT(5) | BIT(21) | BIT(23));          /* AVX_VNNI AVX512_BF16 AMX_FP16 AVX_IFMA */
    r[3] &= ~(BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19)); /* AVX_VNNI_INT8 NE_CONVERT AMX_COMPLEX INT16 AVX10 */
  } else if (leaf == 0xd && subleaf == 0) {
    r[0] &= ~xstate;
  } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24) { /* tiles, TMUL, AVX10 */
    memset(r, 0, 4 * sizeof *r);
  }
}

static void pass_on(int signal, siginfo_t* info, void* context) {
  if (program.sa_flags & SA_SIGINFO) {
    program.sa_sigaction(signal, info, context);
  } else if (program.sa_handler != SIG_DFL && program.sa_handler != SIG_IGN) {
    program.sa_handler(signal);
  } else {
    const struct sigaction end = {.sa_handler = SIG_DFL};
    real_sigaction(SIGSEGV, &end, NULL);
    raise(signal); /* held back until this handler returns */
  }
}

static void on_fault(int signal, siginfo_t* info, void* context) {
  greg_t* g = ((ucontext_t*)context)->uc_mcontext.gregs;
  const unsigned char* code = (const unsigned char*)g[REG_RIP];
  /* A fault of the fetch itself has its own address as RIP, and must not be read. */
  if (info->si_code != SI_KERNEL || code[0] != 0x0f || code[1] != 0xa2) {
    pass_on(signal, info, context);
    return;
  }
  const unsigned leaf = (unsigned)g[REG_RAX], subleaf = (unsigned)g[REG_RCX];
  unsigned r[4];
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
  __asm__ volatile("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "a"(leaf), "c"(subleaf));
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
  hide(leaf, subleaf, r);
  g[REG_RAX] = r[0];
  g[REG_RBX] = r[1];
  g[REG_RCX] = r[2];
  g[REG_RDX] = r[3];
  g[REG_RIP] += 2;
}

static void find_sigaction(void) {
  if (real_sigaction == NULL) *(void**)&real_sigaction = dlsym(RTLD_NEXT, "sigaction");
}

/* Takes the place of the C library's: SIGSEGV stays ours, the program's wish is remembered. */
int sigaction(int signal, const struct sigaction* wish, struct sigaction* old) {
  find_sigaction();
  if (signal != SIGSEGV) return real_sigaction(signal, wish, old);
  const struct sigaction before = program;
  if (wish != NULL) program = *wish;
  if (old != NULL) *old = before;
  return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
  const struct sigaction wish = {.sa_handler = handler, .sa_flags = SA_RESTART};
  struct sigaction old;
  return sigaction(number, &wish, &old) == 0 ? old.sa_handler : SIG_ERR;
}

__attribute__((constructor)) static void start(void) {
  find_sigaction();
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
  sigfillset(&action.sa_mask);
  real_sigaction(SIGSEGV, &action, &program);
  if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0) != 0) {
    fputs("hide_isa: this CPU or kernel cannot fault on CPUID\n", stderr);
    _exit(1);
  }
}
