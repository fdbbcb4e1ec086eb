// libstdc++'s static archive asks glibc 2.32 whether the process has a single thread, to save atomic operations. This
// answer of our own, "no", keeps the library loadable from glibc 2.28 on (manylinux_2_28) and is always safe.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
