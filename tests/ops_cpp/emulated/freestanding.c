// What compiled kernels may call where there is no C library. The tests use them, too.
#include <stddef.h>

void* memcpy(void* restrict target, const void* restrict source, size_t n) {
  for (size_t i = 0; i < n; ++i) ((char*)target)[i] = ((const char*)source)[i];
  return target;
}

void* memset(void* target, int value, size_t n) {
  for (size_t i = 0; i < n; ++i) ((char*)target)[i] = (char)value;
  return target;
}

void __stack_chk_fail(void) { __builtin_trap(); }  // compilers that protect stacks by default

// An instruction that AVX2 machines lack.
__attribute__((target("avx512f"))) void add16(const float* a, const float* b, float* sum) {
  typedef float Vector __attribute__((vector_size(64), aligned(4)));
  *(Vector*)sum = *(const Vector*)a + *(const Vector*)b;
}

// A result that is no integer, from the register to memory.
void call_for_double(double (*function)(long), long argument, double* result) { *result = function(argument); }
