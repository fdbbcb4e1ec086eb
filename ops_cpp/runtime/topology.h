// NUMA nodes of this machine, and which of their CPUs and memory this process may use; read from the kernel's files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hina {

struct NumaNode {
  int id = 0;                     // the kernel's number
  std::vector<int> cpus;          // online
  std::vector<int> allowed_cpus;  // of these, those in the affinity mask of the calling thread
  int64_t memory_bytes = 0;       // 0: a node of CPUs alone
  int64_t free_bytes = 0;
  bool memory_allowed = true;  // by the cpuset
};

struct Topology {
  std::vector<NumaNode> nodes;              // online ones, ascending; at least one
  std::vector<std::vector<int>> distances;  // [nodes][nodes] of the firmware's table, 10: itself; empty if not told
  int64_t page_bytes = 4096;
  std::string huge_pages;  // transparent ones: "always", "madvise", "never" or "unknown"

  // Indices into `nodes` of those with allowed CPUs. Work is dealt out to these, numbered 0.. as they stand here.
  std::vector<int> workers;

  // Of a CPU, the number of its node among `workers`; -1: none.
  std::vector<int16_t> worker_of_cpu;
  // Of a node, by the kernel's number: the worker node itself or the nearest one, for nodes of memory alone (CXL) and
  // those whose CPUs are not allowed; -1: no node.
  std::vector<int16_t> worker_of_node;

  // The kernel's numbers of the worker nodes.
  std::vector<int> worker_ids() const;

  // Nodes by the kernel's numbers in groups of those nearer than another socket: sub-NUMA clusters.
  std::vector<std::vector<int>> near() const;

  // The worker node that the calling thread runs on now; 0 where it runs outside of them.
  int current_worker() const;
};

// `root` goes before /sys and /proc. Whatever the kernel does not tell is taken for one node with all CPUs.
Topology read_topology(const std::string& root = "");

// Bytes that this process can have without swapping, over all nodes: MemAvailable, or what its container's limit
// (cgroup v2) leaves of it; 0 if the kernel does not tell.
int64_t available_memory(const std::string& root = "");

// "0-2,8" as {0, 1, 2, 8}; what is no list of numbers, and what comes after 65535, is left out.
std::vector<int> parse_list(const std::string& text);

}  // namespace hina
