#include "runtime/placement.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace hina {
namespace {

constexpr int kRun = 2 * kMaxNodes;     // neighbours: each node of a period twice
constexpr int kSpread = 3 * kMaxNodes;  // others
constexpr int64_t kHugePage = 2 << 20;  // the largest run that is tried
constexpr int kMovePages = 2;           // MPOL_MF_MOVE of linux/mempolicy.h: pages that only this process maps

bool most(int part, int whole) { return part * 20 >= whole * 19; }  // 95 %

// The placement with `count` nodes in turn, `unit` bytes each, that fits the most samples; `fits` says how many. Not
// known where any samples would fit: unless three runs are sampled for each node in turn, or four pages of every run
// (few huge pages, each with a node of its own).
Placement fit(std::span<const PageSample> samples, int nodes, int count, int64_t unit, int& fits) {
  std::vector<int> votes(static_cast<size_t>(count * nodes));
  size_t runs = 0;
  uintptr_t last = UINTPTR_MAX;
  for (const PageSample& sample : samples) {
    const uintptr_t run = sample.address / static_cast<uintptr_t>(unit);
    runs += run != last;
    last = run;
    ++votes[run % static_cast<uintptr_t>(count) * static_cast<size_t>(nodes) + static_cast<size_t>(sample.node)];
  }
  Placement placement;
  if (count > 1 && runs < 3 * static_cast<size_t>(count) && samples.size() < 4 * runs) return placement;
  fits = 0;
  for (int phase = 0; phase < count; ++phase) {
    const auto begin = votes.begin() + phase * nodes;
    const auto best = std::max_element(begin, begin + nodes);
    if (*best == 0) return placement;  // no sample says where these pages are
    placement.order[phase] = static_cast<uint8_t>(best - begin);
    fits += *best;
  }
  placement.count = count;
  placement.page_bytes = unit;
  return placement;
}

}  // namespace

int move_pages(size_t count, void** pages, const int* nodes, int* status) {
  const long result = syscall(SYS_move_pages, 0, count, pages, nodes, status, nodes == nullptr ? 0 : kMovePages);
  return result < 0 ? errno : 0;  // positive: pages that could not be moved; their status says why
}

std::string refusal(const char* call, int error) {
  return std::string("the kernel refused ") + call + " (" + std::strerror(error) + ")";
}

std::vector<uintptr_t> pages_to_sample(uintptr_t data, int64_t bytes, int64_t page_bytes) {
  const uintptr_t page = static_cast<uintptr_t>(page_bytes);
  const uintptr_t first = data / page, last = (data + static_cast<uintptr_t>(std::max<int64_t>(bytes, 1)) - 1) / page;
  const uintptr_t count = last - first + 1;
  std::vector<uintptr_t> pages;
  const uintptr_t run = std::min<uintptr_t>(count, count <= kRun + kSpread ? count : kRun);
  for (uintptr_t i = 0; i < run; ++i) pages.push_back((first + i) * page);
  uint32_t random = 1;  // where in its part each of the others lies: no stride of ours may meet one of the pages'
  const uintptr_t rest = count - run;
  for (uintptr_t i = 0; rest > 0 && i < kSpread; ++i) {
    const uintptr_t begin = run + rest * i / kSpread, end = run + rest * (i + 1) / kSpread;
    random = random * 1664525u + 1013904223u;
    pages.push_back((first + begin + (random >> 8) % (end - begin)) * page);
  }
  return pages;
}

Found recognise(std::span<const PageSample> samples, int64_t page_bytes) {
  Found found;
  found.sampled = static_cast<int>(samples.size());
  std::vector<PageSample> resident;
  for (const PageSample& sample : samples)
    if (sample.node >= 0 && sample.node <= UINT8_MAX) resident.push_back(sample);
  found.resident = static_cast<int>(resident.size());
  const std::string sampled = std::to_string(found.sampled) + " sampled pages";
  if (found.resident * 2 < found.sampled || resident.empty()) {
    found.pattern = Pattern::kNotResident;
    found.reason = std::to_string(found.resident) + " of " + sampled + " are in memory";
    return found;
  }
  int nodes = 0;
  for (const PageSample& sample : resident) nodes = std::max(nodes, sample.node + 1);
  for (int count = 1; count <= kMaxNodes; ++count) {
    for (int64_t unit = page_bytes; unit <= std::max(kHugePage, page_bytes); unit *= 2) {
      const Placement placement = fit(resident, nodes, count, unit, found.fits);
      if (!placement.known() || !most(found.fits, found.resident)) continue;
      found.placement = placement;
      found.pattern = count == 1 ? Pattern::kOneNode : Pattern::kInterleaved;
      found.reason = std::to_string(found.fits) + " of " + std::to_string(found.resident) + " resident pages fit";
      return found;
    }
  }
  found.fits = 0;
  found.reason = "the nodes of " + std::to_string(found.resident) + " pages make no pattern";
  return found;
}

Found find_placement(const void* data, int64_t bytes, int64_t page_bytes, std::span<const int16_t> owner,
                     MovePages syscall) {
  const std::vector<uintptr_t> addresses = pages_to_sample(reinterpret_cast<uintptr_t>(data), bytes, page_bytes);
  std::vector<void*> pages;
  for (const uintptr_t address : addresses) pages.push_back(reinterpret_cast<void*>(address));
  std::vector<int> status(pages.size(), -1);
  if (const int error = syscall(pages.size(), pages.data(), nullptr, status.data()); error != 0) {
    Found found;
    found.pattern = Pattern::kRefused;
    found.sampled = static_cast<int>(pages.size());
    found.reason = refusal("move_pages", error);
    return found;
  }
  std::vector<PageSample> samples;
  for (size_t i = 0; i < pages.size(); ++i) {
    const int node = status[i];
    const bool mapped = node >= 0 && static_cast<size_t>(node) < owner.size();
    samples.push_back({addresses[i], owner.empty() || node < 0 ? node
                                     : mapped                  ? owner[static_cast<size_t>(node)]
                                                               : -1});
  }
  return recognise(samples, page_bytes);
}

}  // namespace hina
