// The AMX emulator: a preloaded library that runs programs with AMX instructions on CPUs without AMX (AVX2 needed), and
// on CPUs that have it as well. Instructions raise SIGILL there as long as the process has no permission for tiles;
// the emulator says it was granted and never asks the kernel.
//
//   decode.c   which instruction lies at an address
//   tiles.c    what it does: tile state of a thread, loads, products
//   counts.c   how often each was executed, and what it loaded
//   sites.c    how to get there without a signal the next time
//   entry.S    ... and back
//   trap.c     the signal, and the functions of the C library that would get in its way
//
// Variables of the environment:
//   HINA_AMX_EMULATOR     set by the emulator itself: the library takes it as leave to use AMX
//   AMX_EMULATOR_REFUSE   1: permission for tiles is refused, as an old kernel or a sandbox does
//   AMX_EMULATOR_SIGNALS  1: every instruction is a signal, no code is changed but on a CPU with AMX (see `plant`)
//   AMX_EMULATOR_COUNTS   a file; each process that executed AMX instructions appends a line of JSON when it exits
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

enum { TILES = 8, TILE_ROWS = 16, TILE_ROW_BYTES = 64 };

typedef enum {
  LDTILECFG,
  STTILECFG,
  TILERELEASE,
  TILEZERO,
  TILELOADD,
  TILELOADDT1,
  TILESTORED,
  TDPBF16PS,
  TDPBSSD,
  TDPBSUD,
  TDPBUSD,
  TDPBUUD,
} Mnemonic;
enum { MNEMONICS = TDPBUUD + 1 };

// First bytes: of the instructions above, of none in 64-bit mode, of a jump.
enum { VEX = 0xc4, UNDEFINED = 0x06, JUMP = 0xe9 };

extern const char* const mnemonic_names[MNEMONICS];

// A decoded instruction. Registers are numbered as in encodings; base and index are -1 where there is none.
typedef struct {
  const uint8_t* address;
  uint64_t fixed;  // of an operand relative to the instruction: the address that it is relative to
  int32_t displacement;
  uint8_t mnemonic, length;
  uint8_t target;       // tile: destination, or the source of a store
  uint8_t left, right;  // tiles of a product
  int8_t base, index, scale;
} Instruction;

// False where none of the instructions above begins at `code`, up to 13 bytes of which are read.
bool decode(const uint8_t* code, Instruction* instruction);

typedef enum { DONE, INVALID, PROTECTION } Outcome;  // #UD, #GP

// Executes an instruction for the calling thread. `registers` are the 16 general ones in the order of encodings.
Outcome execute(const Instruction* instruction, const uint64_t registers[16]);

// As LDTILECFG from `configuration`, which is a valid one of 64 bytes.
void take_configuration(const void* configuration);

// Count an instruction that was executed, and an entry through a signal.
void count(Mnemonic mnemonic);
void count_signal(void);

// Notes a load that was executed.
void record_load(uint64_t address, int64_t stride, unsigned rows, unsigned row_bytes);

// For tests, by dlsym or ctypes: how often the instruction of this name was executed by all threads, those that ended,
// too; of "signals", how often the emulator was entered through one. All from zero again.
EXPORTED uint64_t amx_emulator_count(const char* name);
EXPORTED void amx_emulator_reset(void);

// One TILELOADD or TILELOADDT1: row r was read from address + r * stride.
typedef struct {
  uint64_t address;
  int64_t stride;
  uint32_t rows, row_bytes;
} Load;

// From now on, loads are noted in `buffer`; NULL ends that. Not to be called while other threads load.
EXPORTED void amx_emulator_record(Load* buffer, uint64_t loads);

// How many loads there were since amx_emulator_record: those beyond the buffer are not in it.
EXPORTED uint64_t amx_emulator_recorded(void);

void start_sites(void);

// The instruction that lay at `address` before its first byte was overwritten; false where none did.
bool find_site(const uint8_t* address, Instruction* instruction);

// Lets the instruction jump to the emulator from now on, if that is possible.
void patch(const Instruction* instruction);

// Makes the instructions that do not raise SIGILL on a CPU with AMX (LDTILECFG, STTILECFG, TILERELEASE: permission is
// for the contents of tiles only) raise it, in the whole program or library that `address` lies in. Does nothing where
// that was done, unless `again`.
void plant(const void* address, bool again);
