// Where the pages of a matrix are: asked of the kernel for a sample of them (move_pages, which moves nothing here), and
// recognised as a pattern.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "moe/placement.h"

namespace hina {

// The system call move_pages of this process; returns 0, or an errno with what it left undone. `nodes` nullptr: ask.
// Tests put their own in its place.
using MovePages = int (*)(size_t count, void** pages, const int* nodes, int* status);
int move_pages(size_t count, void** pages, const int* nodes, int* status);

// "the kernel refused CALL (why)"
std::string refusal(const char* call, int error);

struct PageSample {
  uintptr_t address = 0;  // of the page
  int node = -1;          // the kernel's number; negative: not in memory
};

enum class Pattern { kRefused, kNotResident, kNone, kOneNode, kInterleaved };

struct Found {
  Pattern pattern = Pattern::kNone;
  Placement placement;  // known for the last two patterns
  int sampled = 0;      // pages
  int resident = 0;     // of these, in memory
  int fits = 0;         // of these, where the pattern says
  std::string reason;   // one clause for people
};

// The pages to ask about: a run of neighbours, which shows a period, and others all over, which confirm it.
std::vector<uintptr_t> pages_to_sample(uintptr_t data, int64_t bytes, int64_t page_bytes);

// The pattern with the fewest nodes in turn, then the smallest pages, that at least 95 % of the resident samples fit:
// order[i] of its placement is the node of every count-th run of page_bytes. Pages of huge pages lie on one node in
// runs. The numbers are those of the samples.
Found recognise(std::span<const PageSample> samples, int64_t page_bytes);

// Both, for a matrix. `owner` maps the kernel's numbers to those that the placement shall have; empty: as they are.
Found find_placement(const void* data, int64_t bytes, int64_t page_bytes, std::span<const int16_t> owner,
                     MovePages syscall = move_pages);

}  // namespace hina
