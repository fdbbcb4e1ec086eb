// Where the values of a panel lie, as [groups][n]: for each pair of units (along k) the codes of the first, zeros for
// as many, the codes of the second; then the scales of all units; then the sums of their codes. A tile of 16 groups
// from the first codes on, or from the zeros on, is one unit of the two that a tile of rows has, whatever the other is.
#pragma once

#include <cstdint>

#include "kernels/simd/macros.h"
#include "kernels/tile/tile.h"

namespace hina {
// Internal linkage in every includer, see convert/scalar.h.
namespace {

constexpr int kUnitGroups = kUnit / 4;
constexpr int kPairBytes = 2 * kUnit;  // of a row

HINA_INLINE int64_t units_of(int64_t k) { return (k + kUnit - 1) / kUnit; }
HINA_INLINE int64_t pairs_of(int64_t k) { return (units_of(k) + 1) / 2; }

struct Panel {
  char* codes;
  float* scales;
  float* sums;
  int n;

  HINA_INLINE Panel(const void* panel, int64_t k, int n) : n(n) {
    codes = static_cast<char*>(const_cast<void*>(panel));
    scales = reinterpret_cast<float*>(codes_of(0) + code_groups(k) * 4 * n);
    sums = scales + units_of(k) * n;
  }
  static HINA_INLINE int64_t code_groups(int64_t k) { return (units_of(k) + pairs_of(k)) * kUnitGroups; }
  // The codes of a unit of token 0; those of token t are t groups further.
  HINA_INLINE char* codes_of(int64_t unit) const { return codes + (unit + (unit + 1) / 2) * kUnitGroups * 4 * n; }
};

[[maybe_unused]] int64_t panel_bytes(int64_t k, int n) { return (Panel::code_groups(k) + 2 * units_of(k)) * 4 * n; }

}  // namespace
}  // namespace hina
