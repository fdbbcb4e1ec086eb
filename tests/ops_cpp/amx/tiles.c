// What the instructions do: Intel SDM volume 2, their pages; volume 1, chapter 18, for the state. Exact to the bit.
#include <immintrin.h>
#include <string.h>

#include "emulator.h"

// What LDTILECFG reads and STTILECFG writes.
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} Configuration;
_Static_assert(sizeof(Configuration) == 64, "");

typedef struct {
  Configuration configuration;  // all zeros: none, as at the start of a thread
  uint8_t tiles[TILES][TILE_ROWS][TILE_ROW_BYTES] __attribute__((aligned(64)));
} State;

// Initial-exec: the address is a constant distance from the thread's, with no call into the dynamic linker.
static __thread State state __attribute__((tls_model("initial-exec")));

// --- configuration ---

static bool valid(const Configuration* c) {
  static const uint8_t none[14];
  if (c->palette != 1 || memcmp(c->reserved, none, sizeof none) != 0) return false;
  for (int t = 0; t < 16; ++t) {
    if (t >= TILES && (c->rows[t] != 0 || c->row_bytes[t] != 0)) return false;
    if (c->rows[t] > TILE_ROWS || c->row_bytes[t] > TILE_ROW_BYTES) return false;
    if ((c->rows[t] == 0) != (c->row_bytes[t] == 0)) return false;
  }
  return true;
}

void take_configuration(const void* configuration) {
  memset(&state, 0, sizeof state);
  memcpy(&state.configuration, configuration, sizeof state.configuration);
}

static Outcome load_configuration(const void* from) {
  Configuration wanted;
  memcpy(&wanted, from, sizeof wanted);
  if (wanted.palette == 0) {
    memset(&state, 0, sizeof state);
    return DONE;
  }
  if (!valid(&wanted)) return PROTECTION;
  take_configuration(&wanted);
  return DONE;
}

static unsigned rows_of(int tile) { return state.configuration.rows[tile]; }

static unsigned row_bytes_of(int tile) { return state.configuration.row_bytes[tile]; }

// Where a load or store begins: not 0 after a fault in the midst of one.
static unsigned start_row(void) { return state.configuration.start_row; }

static bool configured(int tile) { return state.configuration.palette != 0 && rows_of(tile) > 0; }

// What is beyond the configured rows and bytes of a tile that was written becomes zero.
static void clear_rest(int tile) {
  for (unsigned r = 0; r < TILE_ROWS; ++r) {
    const unsigned used = r < rows_of(tile) ? row_bytes_of(tile) : 0;
    memset(&state.tiles[tile][r][used], 0, TILE_ROW_BYTES - used);
  }
}

// --- loads and stores ---

static Outcome load(int tile, uint64_t address, int64_t stride) {
  if (!configured(tile) || start_row() >= rows_of(tile)) return INVALID;
  for (unsigned r = start_row(); r < rows_of(tile); ++r)
    memcpy(state.tiles[tile][r], (const void*)(address + r * (uint64_t)stride), row_bytes_of(tile));
  clear_rest(tile);
  state.configuration.start_row = 0;
  record_load(address, stride, rows_of(tile), row_bytes_of(tile));
  return DONE;
}

static Outcome store(int tile, uint64_t address, int64_t stride) {
  if (!configured(tile) || start_row() >= rows_of(tile)) return INVALID;
  for (unsigned r = start_row(); r < rows_of(tile); ++r)
    memcpy((void*)(address + r * (uint64_t)stride), state.tiles[tile][r], row_bytes_of(tile));
  state.configuration.start_row = 0;
  return DONE;
}

static Outcome zero(int tile) {
  if (!configured(tile)) return INVALID;
  memset(state.tiles[tile], 0, sizeof state.tiles[tile]);
  state.configuration.start_row = 0;
  return DONE;
}

// --- products ---
// sums [M, N dwords] += left [M, K dwords] x right [K, N dwords]. Bytes beyond a tile's are zero, so that whole vectors
// of N can be used.

static bool fit(int sums, int left, int right) {
  return configured(sums) && configured(left) && configured(right) && row_bytes_of(sums) % 4 == 0 &&
         row_bytes_of(left) % 4 == 0 && row_bytes_of(right) % 4 == 0 && rows_of(sums) == rows_of(left) &&
         row_bytes_of(sums) == row_bytes_of(right) && row_bytes_of(left) / 4 == rows_of(right);
}

// The first (even) and the second (odd) bfloat16 value of each pair, as float32.
static __m256 even_floats(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

static __m256 odd_floats(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
}

// Even and odd products have sums of their own, added to each other and then to the tile at the end.
static void multiply_bf16(int sums, int left, int right) {
  enum { NEAREST_DAZ_FTZ_MASKED = 0x9fc0 };
  const unsigned mxcsr = _mm_getcsr();
  _mm_setcsr(NEAREST_DAZ_FTZ_MASKED);
  for (unsigned m = 0; m < rows_of(sums); ++m) {
    for (int half = 0; half < 2; ++half) {
      __m256 even = _mm256_setzero_ps(), odd = even;
      for (unsigned k = 0; k < rows_of(right); ++k) {
        int32_t pair;
        memcpy(&pair, &state.tiles[left][m][4 * k], 4);
        const __m256i l = _mm256_set1_epi32(pair);
        const __m256i r = _mm256_load_si256((const __m256i*)state.tiles[right][k] + half);
        even = _mm256_fmadd_ps(even_floats(l), even_floats(r), even);
        odd = _mm256_fmadd_ps(odd_floats(l), odd_floats(r), odd);
      }
      float* sum = (float*)state.tiles[sums][m] + 8 * half;
      _mm256_store_ps(sum, _mm256_add_ps(_mm256_load_ps(sum), _mm256_add_ps(even, odd)));
    }
  }
  _mm_setcsr(mxcsr);
  clear_rest(sums);
}

// The even and the odd bytes as 16-bit integers.
static __m256i even_bytes(__m256i v, bool is_signed) {
  if (is_signed) return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8);
  return _mm256_and_si256(v, _mm256_set1_epi16(0xff));
}

static __m256i odd_bytes(__m256i v, bool is_signed) {
  return is_signed ? _mm256_srai_epi16(v, 8) : _mm256_srli_epi16(v, 8);
}

static inline __attribute__((always_inline)) void multiply_bytes(int sums, int left, int right, bool left_signed,
                                                                 bool right_signed) {
  for (unsigned m = 0; m < rows_of(sums); ++m) {
    for (int half = 0; half < 2; ++half) {
      __m256i* at = (__m256i*)state.tiles[sums][m] + half;
      __m256i sum = _mm256_load_si256(at);
      for (unsigned k = 0; k < rows_of(right); ++k) {
        int32_t quad;
        memcpy(&quad, &state.tiles[left][m][4 * k], 4);
        const __m256i l = _mm256_set1_epi32(quad);
        const __m256i r = _mm256_load_si256((const __m256i*)state.tiles[right][k] + half);
        const __m256i even = _mm256_madd_epi16(even_bytes(l, left_signed), even_bytes(r, right_signed));
        const __m256i odd = _mm256_madd_epi16(odd_bytes(l, left_signed), odd_bytes(r, right_signed));
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
      }
      _mm256_store_si256(at, sum);
    }
  }
  clear_rest(sums);
}

static Outcome multiply(Mnemonic mnemonic, int sums, int left, int right) {
  if (!fit(sums, left, right)) return INVALID;
  state.configuration.start_row = 0;
  switch (mnemonic) {
    case TDPBSSD:
      multiply_bytes(sums, left, right, true, true);
      break;
    case TDPBSUD:
      multiply_bytes(sums, left, right, true, false);
      break;
    case TDPBUSD:
      multiply_bytes(sums, left, right, false, true);
      break;
    case TDPBUUD:
      multiply_bytes(sums, left, right, false, false);
      break;
    default:
      multiply_bf16(sums, left, right);
  }
  return DONE;
}

Outcome execute(const Instruction* i, const uint64_t registers[16]) {
  const uint64_t base = i->fixed + (i->base < 0 ? 0 : registers[i->base]) + (uint64_t)(int64_t)i->displacement;
  const uint64_t index = i->index < 0 ? 0 : registers[i->index] << i->scale;  // of loads and stores: the stride
  switch (i->mnemonic) {
    case LDTILECFG:
      return load_configuration((const void*)(base + index));
    case STTILECFG:
      memcpy((void*)(base + index), &state.configuration, sizeof state.configuration);
      return DONE;
    case TILERELEASE:
      memset(&state, 0, sizeof state);
      return DONE;
    case TILEZERO:
      return zero(i->target);
    case TILELOADD:
    case TILELOADDT1:
      return load(i->target, base, (int64_t)index);
    case TILESTORED:
      return store(i->target, base, (int64_t)index);
    default:
      return multiply((Mnemonic)i->mnemonic, i->target, i->left, i->right);
  }
}
