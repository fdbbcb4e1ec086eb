// What the user wants done about NUMA nodes: HINA_NUMA, else the session config entry hina.numa, else auto.
//
//   off         nothing
//   auto        off with one node to work on, without asking the kernel anything. Else interleave where at least 90 %
//               of the matrices of a layer's experts lie in a pattern, and not all on one node; else off. While pages
//               are not in memory yet, this is asked again before the runs 1, 2, 4, 8, ...
//   interleave  the same with however few matrices in a pattern; pages that are not in memory are waited for until run
//               64
//   bind        moves the pages of each matrix when the session is made, one part of it to each node
//   copy        copies each matrix to each node when the session is made
#pragma once

#include <optional>
#include <string>

namespace hina {

enum class NumaMode { kOff, kAuto, kInterleave, kBind, kCopy };

struct NumaChoice {
  NumaMode mode = NumaMode::kAuto;
  std::string asked_by = "default";  // or "HINA_NUMA", "hina.numa"
  std::string error;                 // not empty when HINA_NUMA is no mode: the mode is off then
};

const char* numa_mode_name(NumaMode mode);

// The mode called so; for any other word nothing, and `error` says which there are. `what` is where the word stands.
std::optional<NumaMode> parse_numa_mode(const std::string& word, const std::string& what, std::string& error);

// `entry` is that of the session. Reads HINA_NUMA at every call.
NumaChoice choose_numa(std::optional<NumaMode> entry);

}  // namespace hina
