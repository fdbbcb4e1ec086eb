// Encodings: Intel SDM volume 2, chapter 2.3 (VEX) and the pages of the instructions. All are VEX.128 of the map 0F38
// with W = 0: opcodes 49 (configuration, TILEZERO), 4B (loads, stores), 5C and 5E (products). Prefixes for segments and
// 32-bit addresses are not known here.
#include <string.h>

#include "emulator.h"

const char* const mnemonic_names[MNEMONICS] = {
    "ldtilecfg",  "sttilecfg", "tilerelease", "tilezero", "tileloadd", "tileloaddt1",
    "tilestored", "tdpbf16ps", "tdpbssd",     "tdpbsud",  "tdpbusd",   "tdpbuud",
};

// The fields of a VEX prefix, its opcode and its ModRM byte; inverted bits are turned back.
typedef struct {
  bool r, x, b;
  int vvvv, prefix;  // prefix: 0 none, 1 66, 2 F3, 3 F2
  int opcode, mod, reg, rm;
} Fields;

static bool decode_registers(const Fields* f, Instruction* i) {
  i->target = (uint8_t)f->reg;
  i->left = (uint8_t)f->rm;
  i->right = (uint8_t)f->vvvv;
  if (f->r || f->b) return false;
  if (f->opcode == 0x49) {
    const bool release = f->prefix == 0 && f->reg == 0 && f->rm == 0;
    const bool zero = f->prefix == 3 && f->rm == 0;
    i->mnemonic = release ? TILERELEASE : TILEZERO;
    return f->vvvv == 0 && (release || zero);
  }
  if (f->opcode == 0x5c && f->prefix == 2) {
    i->mnemonic = TDPBF16PS;
  } else if (f->opcode == 0x5e) {
    static const uint8_t by_prefix[4] = {TDPBUUD, TDPBUSD, TDPBSUD, TDPBSSD};
    i->mnemonic = by_prefix[f->prefix];
  } else {
    return false;
  }
  return f->vvvv < TILES && f->reg != f->rm && f->reg != f->vvvv && f->rm != f->vvvv;
}

// Returns the byte behind the operand.
static const uint8_t* decode_address(const Fields* f, const uint8_t* at, Instruction* i) {
  bool relative = false, absolute = false;
  if (f->rm == 4) {
    const int sib = *at++;
    const int index = (sib >> 3 & 7) | f->x << 3, base = sib & 7;
    if (index != 4) {
      i->index = (int8_t)index;
      i->scale = (int8_t)(sib >> 6);
    }
    absolute = base == 5 && f->mod == 0;
    if (!absolute) i->base = (int8_t)(base | f->b << 3);
  } else {
    relative = f->rm == 5 && f->mod == 0;
    if (!relative) i->base = (int8_t)(f->rm | f->b << 3);
  }
  if (f->mod == 1) {
    i->displacement = (int8_t)*at++;
  } else if (f->mod == 2 || relative || absolute) {
    memcpy(&i->displacement, at, 4);
    at += 4;
  }
  if (relative) i->fixed = (uint64_t)at;
  return at;
}

static bool decode_memory(const Fields* f, Instruction* i) {
  i->target = (uint8_t)f->reg;
  if (f->r || f->vvvv != 0) return false;
  if (f->opcode == 0x49) {
    i->mnemonic = f->prefix == 0 ? LDTILECFG : STTILECFG;
    return f->reg == 0 && f->prefix <= 1;
  }
  i->mnemonic = f->prefix == 3 ? TILELOADD : f->prefix == 1 ? TILELOADDT1 : TILESTORED;
  return f->opcode == 0x4b && f->rm == 4 && f->prefix != 0;
}

bool decode(const uint8_t* code, Instruction* instruction) {
  enum { MAP_0F38 = 2, W_OR_256 = 0x84 };
  *instruction = (Instruction){.address = code, .base = -1, .index = -1};
  if (code[0] != VEX || (code[1] & 0x1f) != MAP_0F38 || code[2] & W_OR_256) return false;
  const Fields f = {
      .r = !(code[1] & 0x80),
      .x = !(code[1] & 0x40),
      .b = !(code[1] & 0x20),
      .vvvv = ~code[2] >> 3 & 15,
      .prefix = code[2] & 3,
      .opcode = code[3],
      .mod = code[4] >> 6,
      .reg = code[4] >> 3 & 7,
      .rm = code[4] & 7,
  };
  const uint8_t* end = code + 5;
  if (f.mod == 3) {
    if (!decode_registers(&f, instruction)) return false;
  } else {
    if (!decode_memory(&f, instruction)) return false;
    end = decode_address(&f, end, instruction);
  }
  instruction->length = (uint8_t)(end - code);
  return true;
}
