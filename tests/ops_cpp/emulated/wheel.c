// Preloaded into the process that imports bochscpu: provides two functions of glibc 2.38 that its wheel wants, for an
// older glibc, and gives it a Sapphire Rapids where it asks for a Cannon Lake (no VNNI, no BF16).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#if !__GLIBC_PREREQ(2, 38)
unsigned long long __isoc23_strtoull(const char* text, char** end, int base) { return strtoull(text, end, base); }

int __isoc23_sscanf(const char* text, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int result = vsscanf(text, format, arguments);
  va_end(arguments);
  return result;
}
#endif

void* _Z23create_corei3_cnl_cpuidP8BX_CPU_C(void* cpu) {
  void* (*create)(void*) = (void* (*)(void*))dlsym(RTLD_DEFAULT, "_Z28create_sapphire_rapids_cpuidP8BX_CPU_C");
  return create(cpu);
}
