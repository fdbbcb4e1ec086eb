// What the vector sources of all families share beside a vocabulary.
#pragma once

#define HINA_INLINE inline __attribute__((always_inline))
#define HINA_INLINE_LAMBDA __attribute__((always_inline))
#define HINA_UNROLL _Pragma("GCC unroll 32")
