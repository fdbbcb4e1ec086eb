#include "op/numa_query.h"

#include <cstdint>
#include <cstdio>
#include <iterator>
#include <vector>

#include "numa/layer.h"
#include "op/json.h"
#include "runtime/placement.h"
#include "runtime/topology.h"

namespace hina {
namespace {

const char* json_flag(bool flag) { return flag ? "true" : "false"; }

std::string json_lists(const std::vector<std::vector<int>>& lists) {
  std::string out = "[";
  for (const std::vector<int>& list : lists) {
    if (out.size() > 1) out += ',';
    out += json_numbers(list);
  }
  return out + "]";
}

std::string node_json(const NumaNode& node) {
  return "{\"id\":" + std::to_string(node.id) + ",\"cpus\":" + json_numbers(node.cpus) +
         ",\"allowed_cpus\":" + json_numbers(node.allowed_cpus) +
         ",\"memory_bytes\":" + std::to_string(node.memory_bytes) +
         ",\"free_bytes\":" + std::to_string(node.free_bytes) +
         ",\"memory_allowed\":" + json_flag(node.memory_allowed) + "}";
}

}  // namespace

std::string topology_json(const std::string& root) {
  const Topology topology = read_topology(root);
  const NumaChoice choice = choose_numa(std::nullopt);
  std::string nodes = "[";
  std::vector<int> usable;
  for (const NumaNode& node : topology.nodes) {
    if (nodes.size() > 1) nodes += ',';
    nodes += node_json(node);
    if (node.memory_allowed) usable.push_back(node.id);
  }
  const std::string reason = why_numa_is_off(topology, choice.mode);
  const NumaMode mode = reason.empty() ? choice.mode : NumaMode::kOff;
  return "{\"nodes\":" + nodes + "],\"distances\":" + json_lists(topology.distances) +
         ",\"page_bytes\":" + std::to_string(topology.page_bytes) +
         ",\"huge_pages\":" + json_string(topology.huge_pages) + ",\"usable\":" + json_numbers(usable) +
         ",\"workers\":" + json_numbers(topology.worker_ids()) + ",\"near\":" + json_lists(topology.near()) +
         ",\"asked\":" + json_string(numa_mode_name(choice.mode)) + ",\"asked_by\":" + json_string(choice.asked_by) +
         ",\"mode\":" + json_string(numa_mode_name(mode)) + ",\"mode_reason\":" + json_string(reason) +
         ",\"error\":" + (choice.error.empty() ? "null" : json_string(choice.error)) + "}";
}

std::string placement_json(const std::string& range) {
  constexpr const char* kPatterns[] = {"refused", "not resident", "none", "one node", "interleaved"};
  unsigned long long address = 0;
  long long bytes = 0;
  if (std::sscanf(range.c_str(), "%llu %lld", &address, &bytes) != 2 || bytes <= 0) return "null";
  const int64_t page_bytes = read_topology().page_bytes;
  const Found found = find_placement(reinterpret_cast<const void*>(address), bytes, page_bytes, {});
  const Placement& placement = found.placement;
  const std::vector<int> order(placement.order, placement.order + placement.count);
  return std::string("{\"pattern\":\"") + kPatterns[static_cast<int>(found.pattern)] +
         "\",\"nodes\":" + json_numbers(order) + ",\"page_bytes\":" + std::to_string(placement.page_bytes) +
         ",\"huge_pages\":" + json_flag(found.pattern == Pattern::kInterleaved && placement.page_bytes > page_bytes) +
         ",\"sampled\":" + std::to_string(found.sampled) + ",\"resident\":" + std::to_string(found.resident) +
         ",\"fits\":" + std::to_string(found.fits) + ",\"reason\":" + json_string(found.reason) + "}";
}

}  // namespace hina
