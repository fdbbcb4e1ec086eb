// HINA_OPAQUE(v): the compiler may assume nothing about the value of the vector v from here on. Without it, it would
// compute equal products or sums once. No instruction comes of it.
#pragma once

#if defined(__x86_64__)
#define HINA_OPAQUE(v) __asm__ volatile("" : "+x"(v))
#define HINA_OPAQUE_512(v) __asm__ volatile("" : "+v"(v))
#elif defined(__aarch64__)
#define HINA_OPAQUE(v) __asm__ volatile("" : "+w"(v))
#else
#define HINA_OPAQUE(v) __asm__ volatile("" : "+m"(v))
#endif

#define HINA_UNROLL _Pragma("GCC unroll 32")
