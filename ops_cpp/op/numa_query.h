// What HinaQuery says about NUMA nodes.
#pragma once

#include <string>

namespace hina {

// Nodes, distances, page sizes and the mode of this machine, or of the one whose /sys and /proc lie in `root`.
std::string topology_json(const std::string& root);

// "ADDRESS BYTES", decimal, of memory of this process: where its pages are, by the kernel's numbers of nodes.
std::string placement_json(const std::string& range);

}  // namespace hina
