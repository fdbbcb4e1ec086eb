#include "runtime/topology.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <iterator>

#include "runtime/files.h"

namespace hina {
namespace {

constexpr int kMostNumbers = 1 << 16;  // CPUs, nodes
constexpr int kRemote = 20;            // ACPI: the distance of another socket, where firmware measures nothing

// The first number at or after `text[at]`; 0 if there is none.
int64_t number_at(const std::string& text, size_t at) {
  const size_t begin = text.find_first_of("0123456789", at);
  int64_t value = 0;
  if (begin != std::string::npos) std::from_chars(text.data() + begin, text.data() + text.size(), value);
  return value;
}

// What stands after `key` in its line of a file of such lines; empty if there is no such line.
std::string field(const std::string& text, const std::string& key) {
  const size_t at = text.find(key);
  if (at == std::string::npos) return {};
  const size_t begin = at + key.size();
  return text.substr(begin, text.find('\n', begin) - begin);
}

std::vector<int> numbers(const std::string& text) {
  std::vector<int> out;
  for (size_t at = 0; (at = text.find_first_of("0123456789", at)) != std::string::npos;) {
    out.push_back(static_cast<int>(number_at(text, at)));
    at = text.find_first_not_of("0123456789", at);
  }
  return out;
}

// What both ascending lists have.
std::vector<int> common(const std::vector<int>& a, const std::vector<int>& b) {
  std::vector<int> out;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(out));
  return out;
}

bool contains(const std::vector<int>& list, int value) { return std::binary_search(list.begin(), list.end(), value); }

// The process's own limits, of the calling thread where the kernel tells.
struct Allowed {
  std::string cpus, memory;  // lists; empty: not told

  explicit Allowed(const std::string& root) {
    std::string status = read_file(root + "/proc/thread-self/status");
    if (status.empty()) status = read_file(root + "/proc/self/status");
    cpus = field(status, "Cpus_allowed_list:");
    memory = field(status, "Mems_allowed_list:");
  }
};

NumaNode read_node(const std::string& folder, int id) {
  NumaNode node;
  node.id = id;
  node.cpus = parse_list(read_file(folder + "/cpulist"));
  const std::string meminfo = read_file(folder + "/meminfo");
  node.memory_bytes = number_at(field(meminfo, "MemTotal:"), 0) * 1024;
  node.free_bytes = number_at(field(meminfo, "MemFree:"), 0) * 1024;
  return node;
}

// Square, or nothing: a machine may tell the distances of some nodes only.
std::vector<std::vector<int>> read_distances(const std::string& folder, const std::vector<NumaNode>& nodes) {
  std::vector<std::vector<int>> table;
  for (const NumaNode& node : nodes) {
    table.push_back(numbers(read_file(folder + "/node" + std::to_string(node.id) + "/distance")));
    if (table.back().size() != nodes.size()) return {};
  }
  return table;
}

// "always [madvise] never"
std::string read_huge_pages(const std::string& root) {
  const std::string text = read_file(root + "/sys/kernel/mm/transparent_hugepage/enabled");
  const size_t begin = text.find('['), end = text.find(']');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return "unknown";
  return text.substr(begin + 1, end - begin - 1);
}

// The number among `workers` of the worker node nearest to nodes[index], the first of those equally near.
int nearest_worker(const Topology& topology, size_t index) {
  int best = 0;
  const auto distance = [&](int worker) {
    const size_t at = static_cast<size_t>(topology.workers[static_cast<size_t>(worker)]);
    return at == index ? 0 : topology.distances.empty() ? kRemote : topology.distances[index][at];
  };
  for (int worker = 1; worker < static_cast<int>(topology.workers.size()); ++worker)
    if (distance(worker) < distance(best)) best = worker;
  return best;
}

void find_workers(Topology& topology) {
  for (size_t i = 0; i < topology.nodes.size(); ++i)
    if (!topology.nodes[i].allowed_cpus.empty()) topology.workers.push_back(static_cast<int>(i));
  if (topology.workers.empty()) topology.workers.push_back(0);  // no CPU of the mask is one of a node's
  for (size_t i = 0; i < topology.nodes.size(); ++i) {
    const NumaNode& node = topology.nodes[i];
    const auto put = [](std::vector<int16_t>& map, int at, int value) {
      if (static_cast<size_t>(at) >= map.size()) map.resize(static_cast<size_t>(at) + 1, -1);
      map[static_cast<size_t>(at)] = static_cast<int16_t>(value);
    };
    const int worker = nearest_worker(topology, i);
    put(topology.worker_of_node, node.id, worker);
    // Also CPUs that are not allowed now: an affinity mask may widen later.
    for (const int cpu : node.cpus) put(topology.worker_of_cpu, cpu, worker);
  }
}

}  // namespace

std::vector<int> parse_list(const std::string& text) {
  std::vector<int> out;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end && (*at == ' ' || *at == '\t')) ++at;
  while (at < end) {
    int first = 0;
    const auto [after, error] = std::from_chars(at, end, first);
    if (error != std::errc() || first < 0) break;
    int last = first;
    at = after;
    if (at < end && *at == '-') {
      const auto [after_last, last_error] = std::from_chars(at + 1, end, last);
      if (last_error != std::errc()) break;
      at = after_last;
    }
    for (int i = first; i <= last && i < kMostNumbers; ++i) out.push_back(i);
    if (at == end || *at != ',') break;
    ++at;
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

int64_t available_memory(const std::string& root) {
  const int64_t free = number_at(field(read_file(root + "/proc/meminfo"), "MemAvailable:"), 0) * 1024;
  // In a container, its own group is the root of what it sees. What it has of the page cache can be dropped.
  const std::string group = root + "/sys/fs/cgroup";
  const int64_t limit = number_at(read_file(group + "/memory.max"), 0);  // or "max"
  if (limit == 0) return free;
  const int64_t left = std::max<int64_t>(limit - number_at(field(read_file(group + "/memory.stat"), "anon "), 0), 1);
  return free == 0 ? left : std::min(free, left);
}

Topology read_topology(const std::string& root) {
  Topology topology;
  topology.page_bytes = sysconf(_SC_PAGESIZE);
  topology.huge_pages = read_huge_pages(root);
  const Allowed allowed(root);
  const std::string folder = root + "/sys/devices/system/node";
  const std::string online = read_file(root + "/sys/devices/system/cpu/online");
  for (const int id : parse_list(read_file(folder + "/online")))
    topology.nodes.push_back(read_node(folder + "/node" + std::to_string(id), id));
  if (topology.nodes.empty()) {  // a kernel without NUMA, or /sys is not mounted
    topology.nodes.emplace_back();
    topology.nodes[0].cpus = parse_list(online.empty() ? allowed.cpus : online);
    const std::string meminfo = read_file(root + "/proc/meminfo");
    topology.nodes[0].memory_bytes = number_at(field(meminfo, "MemTotal:"), 0) * 1024;
    topology.nodes[0].free_bytes = number_at(field(meminfo, "MemFree:"), 0) * 1024;
  }
  topology.distances = read_distances(folder, topology.nodes);
  const std::vector<int> cpus = parse_list(allowed.cpus), memory = parse_list(allowed.memory);
  for (NumaNode& node : topology.nodes) {
    if (!online.empty()) node.cpus = common(node.cpus, parse_list(online));
    node.allowed_cpus = allowed.cpus.empty() ? node.cpus : common(node.cpus, cpus);
    node.memory_allowed = node.memory_bytes > 0 && (allowed.memory.empty() || contains(memory, node.id));
  }
  find_workers(topology);
  return topology;
}

std::vector<int> Topology::worker_ids() const {
  std::vector<int> ids;
  for (const int worker : workers) ids.push_back(nodes[static_cast<size_t>(worker)].id);
  return ids;
}

std::vector<std::vector<int>> Topology::near() const {
  std::vector<std::vector<size_t>> groups;
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto is_near = [&](const auto& group) { return !distances.empty() && distances[group.front()][i] < kRemote; };
    const auto found = std::find_if(groups.begin(), groups.end(), is_near);
    (found == groups.end() ? groups.emplace_back() : *found).push_back(i);
  }
  std::vector<std::vector<int>> ids(groups.size());
  for (size_t g = 0; g < groups.size(); ++g)
    for (const size_t i : groups[g]) ids[g].push_back(nodes[i].id);
  return ids;
}

int Topology::current_worker() const {
  const int cpu = sched_getcpu();
  if (cpu < 0 || static_cast<size_t>(cpu) >= worker_of_cpu.size()) return 0;
  return std::max<int>(worker_of_cpu[static_cast<size_t>(cpu)], 0);
}

}  // namespace hina
