// A signal takes microseconds. So the first one at an instruction ("site") overwrites it with a jump, five bytes, which
// none of the instructions is shorter than; the jump leads to a stub nearby that leads on to entry.S.
#define _GNU_SOURCE
#include <link.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "emulator.h"

enum { SITES = 1 << 16, OBJECTS = 256, PAGE = 4096, JUMP_BYTES = 5 };
enum { STUB_BYTES = 32, BLOCK_BYTES = 1 << 16, BLOCKS = 256 };

static int lock;       // of everything below but `sites` and `table`, which are read without it
static bool patching;  // is allowed
static bool can_synchronise;

// --- the table of sites ---

// A library that is loaded again, at the same place, has sites of the same numbers.
static Instruction sites[SITES];   // from 1 on; complete before its number comes into the table
static uint8_t* stubs[SITES];      // those made, by the same number
static uint32_t table[2 * SITES];  // hashed by address, open addressing; 0 is empty
static uint32_t known;

static uint32_t* slot(const uint8_t* address) {
  uint32_t at = (uint32_t)((uint64_t)address * 0x9e3779b97f4a7c15 >> 40) % (2 * SITES);
  for (;; at = (at + 1) % (2 * SITES)) {
    const uint32_t number = __atomic_load_n(&table[at], __ATOMIC_ACQUIRE);
    if (number == 0 || sites[number].address == address) return &table[at];
  }
}

// Its number; 0 when the table is full.
static uint32_t add_site(const Instruction* instruction) {
  uint32_t* at = slot(instruction->address);
  const uint32_t number = *at != 0 ? *at : known + 1;
  if (number == SITES) return 0;
  sites[number] = *instruction;
  if (number > known) known = number;
  __atomic_store_n(at, number, __ATOMIC_RELEASE);
  return number;
}

bool find_site(const uint8_t* address, Instruction* instruction) {
  const uint32_t number = __atomic_load_n(slot(address), __ATOMIC_ACQUIRE);
  if (number == 0 || (address[0] != UNDEFINED && address[0] != JUMP)) return false;
  *instruction = sites[number];
  return true;
}

// --- changing code that other threads run ---

static void synchronise_cores(void) {
  enum { PRIVATE_EXPEDITED_SYNC_CORE = 1 << 5 };
  if (can_synchronise) syscall(SYS_membarrier, PRIVATE_EXPEDITED_SYNC_CORE, 0, 0);
}

static bool protect(const uint8_t* code, int protection) {
  const uint64_t first = (uint64_t)code / PAGE * PAGE, end = (uint64_t)code + JUMP_BYTES;
  return mprotect((void*)first, end - first, protection) == 0;
}

// Threads that come by raise SIGILL, and find the instruction in the table.
static void write_undefined(uint8_t* code) {
  __atomic_store_n(code, UNDEFINED, __ATOMIC_SEQ_CST);
  synchronise_cores();
}

static void write_jump(uint8_t* code, const uint8_t* target) {
  const int32_t distance = (int32_t)(target - (code + JUMP_BYTES));
  write_undefined(code);
  memcpy(code + 1, &distance, sizeof distance);
  synchronise_cores();
  __atomic_store_n(code, JUMP, __ATOMIC_SEQ_CST);
  synchronise_cores();
}

// --- stubs ---

static struct {
  uint8_t* memory;
  size_t used;
} blocks[BLOCKS];
static int n_blocks;

static bool near(const uint8_t* a, const uint8_t* b) { return llabs(a - b) < 0x78000000; }

// A free place of 64 KiB within the reach of a jump from `code`; nullptr where there is none.
static uint8_t* map_near(const uint8_t* code) {
  const uint64_t step = 1 << 20, steps = 1900;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
  for (uint64_t n = 2; n < 2 * steps; ++n) {
    const uint64_t distance = n / 2 * step, start = (uint64_t)code / BLOCK_BYTES * BLOCK_BYTES;
    void* wanted = (void*)(n % 2 == 0 ? start - distance : start + distance);
    void* got = mmap(wanted, BLOCK_BYTES, PROT_READ | PROT_WRITE | PROT_EXEC, flags, -1, 0);
    if (got == wanted) return got;
    if (got != MAP_FAILED) munmap(got, BLOCK_BYTES);  // a kernel that does not know the last flag
  }
  return NULL;
}

static uint8_t* new_stub(const uint8_t* code) {
  for (int i = 0; i < n_blocks; ++i) {
    if (!near(blocks[i].memory, code) || blocks[i].used + STUB_BYTES > BLOCK_BYTES) continue;
    blocks[i].used += STUB_BYTES;
    return blocks[i].memory + blocks[i].used - STUB_BYTES;
  }
  uint8_t* memory = n_blocks < BLOCKS ? map_near(code) : NULL;
  if (memory == NULL) return NULL;
  blocks[n_blocks].memory = memory;
  blocks[n_blocks++].used = STUB_BYTES;
  return memory;
}

void emulator_entry(void);  // entry.S

static uint8_t* make_stub(const uint8_t* code, uint32_t number) {
  if (stubs[number] != NULL) return stubs[number];
  // The address that the last one reads lies behind it.
  static const uint8_t template[STUB_BYTES] = {
      0x48, 0x8d, 0x64, 0x24, 0x80,     // lea -128(%rsp), %rsp
      0x68, 0,    0,    0,    0,        // push $number
      0xff, 0x25, 0,    0,    0,    0,  // jmp *0(%rip)
  };
  void (*const entry)(void) = emulator_entry;
  uint8_t* stub = new_stub(code);
  if (stub == NULL) return NULL;
  stubs[number] = stub;
  memcpy(stub, template, sizeof template);
  memcpy(stub + 6, &number, sizeof number);
  memcpy(stub + 16, &entry, sizeof entry);
  return stub;
}

// Called by entry.S: returns where to go on.
__attribute__((visibility("hidden"), used)) uint64_t execute_site(uint32_t number, uint64_t registers[16]) {
  enum { RSP = 4, BEHIND_FLAGS_AND_NUMBER = 18, RED_ZONE = 128 };
  const Instruction* instruction = &sites[number];
  registers[RSP] = (uint64_t)&registers[BEHIND_FLAGS_AND_NUMBER] + RED_ZONE;
  const Outcome outcome = execute(instruction, registers);
  if (outcome != DONE) {
    fprintf(stderr, "AMX emulator: %s at %p: %s\n", mnemonic_names[instruction->mnemonic], (void*)instruction->address,
            outcome == INVALID ? "invalid instruction" : "protection fault");
    raise(outcome == INVALID ? SIGILL : SIGSEGV);
    return (uint64_t)instruction->address;  // a handler that returns has mended it, or gets the next signal
  }
  count((Mnemonic)instruction->mnemonic);
  return (uint64_t)instruction->address + instruction->length;
}

void patch(const Instruction* instruction) {
  // Another thread that is at it does not wait for this one; the next signal is another chance.
  if (!patching || __atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE)) return;
  uint8_t* code = (uint8_t*)instruction->address;
  if (code[0] != JUMP) {
    const uint32_t number = add_site(instruction);
    const uint8_t* stub = number == 0 ? NULL : make_stub(code, number);
    if (stub != NULL && protect(code, PROT_READ | PROT_WRITE | PROT_EXEC)) {
      write_jump(code, stub);
      protect(code, PROT_READ | PROT_EXEC);
    }
  }
  __atomic_store_n(&lock, 0, __ATOMIC_RELEASE);
}

// --- planting ---

// An executable segment that was searched, and the last instruction that was found in it.
typedef struct {
  const uint8_t *first, *end, *site;
} Range;

static Range planted[OBJECTS];
static int n_planted;

// False, too, where another library, or the same one once more, was loaded in place of the one that was searched.
static bool was_planted(const uint8_t* address) {
  for (int i = 0; i < __atomic_load_n(&n_planted, __ATOMIC_ACQUIRE); ++i)
    if (address >= planted[i].first && address < planted[i].end)
      return planted[i].site == NULL || *planted[i].site == UNDEFINED || *planted[i].site == JUMP;
  return false;
}

static void plant_range(Range range) {
  enum { LONGEST = 15 };
  for (const uint8_t* code = range.first; code + LONGEST < range.end; ++code) {
    Instruction instruction;
    if (code[0] != VEX || code[3] != 0x49 || !decode(code, &instruction) || instruction.mnemonic == TILEZERO) continue;
    if (add_site(&instruction) == 0 || !protect(code, PROT_READ | PROT_WRITE | PROT_EXEC)) continue;
    write_undefined((uint8_t*)code);
    protect(code, PROT_READ | PROT_EXEC);
    range.site = code;
  }
  int at = 0;
  while (at < n_planted && planted[at].first != range.first) ++at;
  if (at == OBJECTS) return;
  planted[at] = range;
  if (at == n_planted) __atomic_store_n(&n_planted, n_planted + 1, __ATOMIC_RELEASE);
}

// For dl_iterate_phdr: plants the segment that holds `wanted`, if it is one of this object.
static int plant_object(struct dl_phdr_info* object, size_t size, void* wanted) {
  (void)size;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr)* segment = &object->dlpi_phdr[i];
    if (segment->p_type != PT_LOAD || !(segment->p_flags & PF_X)) continue;
    const uint8_t* first = (const uint8_t*)(object->dlpi_addr + segment->p_vaddr);
    const Range range = {first, first + segment->p_memsz, NULL};
    if ((const uint8_t*)wanted < range.first || (const uint8_t*)wanted >= range.end) continue;
    plant_range(range);
    return 1;
  }
  return 0;
}

void plant(const void* address, bool again) {
  if (!again && was_planted(address)) return;
  while (__atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE)) sched_yield();
  if (again || !was_planted(address)) dl_iterate_phdr(plant_object, (void*)address);
  __atomic_store_n(&lock, 0, __ATOMIC_RELEASE);
}

void start_sites(void) {
  enum { REGISTER_PRIVATE_EXPEDITED_SYNC_CORE = 1 << 6 };
  can_synchronise = syscall(SYS_membarrier, REGISTER_PRIVATE_EXPEDITED_SYNC_CORE, 0, 0) == 0;
  patching = getenv("AMX_EMULATOR_SIGNALS") == NULL;
}
