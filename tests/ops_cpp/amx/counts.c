// Counts of all threads together, those that ended too, and the addresses of loads. Programs find the exported
// functions by dlsym, tests by ctypes.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulator.h"

static uint64_t counts[MNEMONICS];
static uint64_t signals;

void count(Mnemonic mnemonic) { __atomic_fetch_add(&counts[mnemonic], 1, __ATOMIC_RELAXED); }

void count_signal(void) { __atomic_fetch_add(&signals, 1, __ATOMIC_RELAXED); }

uint64_t amx_emulator_count(const char* name) {
  for (int i = 0; i < MNEMONICS; ++i)
    if (strcmp(name, mnemonic_names[i]) == 0) return __atomic_load_n(&counts[i], __ATOMIC_RELAXED);
  return strcmp(name, "signals") == 0 ? __atomic_load_n(&signals, __ATOMIC_RELAXED) : 0;
}

void amx_emulator_reset(void) {
  for (int i = 0; i < MNEMONICS; ++i) __atomic_store_n(&counts[i], 0, __ATOMIC_RELAXED);
  __atomic_store_n(&signals, 0, __ATOMIC_RELAXED);
}

static Load* loads;
static uint64_t capacity, loaded;

void amx_emulator_record(Load* buffer, uint64_t buffer_loads) {
  loads = buffer;
  capacity = buffer == NULL ? 0 : buffer_loads;
  loaded = 0;
}

uint64_t amx_emulator_recorded(void) { return __atomic_load_n(&loaded, __ATOMIC_ACQUIRE); }

void record_load(uint64_t address, int64_t stride, unsigned rows, unsigned row_bytes) {
  if (loads == NULL) return;
  const uint64_t at = __atomic_fetch_add(&loaded, 1, __ATOMIC_ACQ_REL);
  if (at < capacity) loads[at] = (Load){address, stride, rows, row_bytes};
}

__attribute__((destructor)) static void write_counts(void) {
  const char* path = getenv("AMX_EMULATOR_COUNTS");
  uint64_t all = 0;
  for (int i = 0; i < MNEMONICS; ++i) all += counts[i];
  if (path == NULL || all == 0) return;
  char line[1024];
  int n = 0;
  for (int i = 0; i < MNEMONICS; ++i)
    n +=
        snprintf(line + n, sizeof line - (size_t)n, "%s\"%s\": %lu", i == 0 ? "{" : ", ", mnemonic_names[i], counts[i]);
  n += snprintf(line + n, sizeof line - (size_t)n, ", \"signals\": %lu}\n", signals);
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0 || write(file, line, (size_t)n) != n) perror("AMX emulator: the counts cannot be written");
  if (file >= 0) close(file);
}
