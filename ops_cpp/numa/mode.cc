#include "numa/mode.h"

#include <cstdlib>
#include <iterator>

namespace hina {
namespace {
constexpr const char* kModes[] = {"off", "auto", "interleave", "bind", "copy"};
}

const char* numa_mode_name(NumaMode mode) { return kModes[static_cast<int>(mode)]; }

std::optional<NumaMode> parse_numa_mode(const std::string& word, const std::string& what, std::string& error) {
  for (size_t i = 0; i < std::size(kModes); ++i)
    if (word == kModes[i]) return static_cast<NumaMode>(i);
  error = what + " is '" + word + "', expected one of:";
  for (const char* mode : kModes) error += std::string(" ") + mode;
  return std::nullopt;
}

NumaChoice choose_numa(std::optional<NumaMode> entry) {
  NumaChoice choice;
  if (entry) choice = {*entry, "hina.numa", {}};
  const char* variable = std::getenv("HINA_NUMA");
  if (variable == nullptr || *variable == '\0') return choice;
  choice.asked_by = "HINA_NUMA";
  choice.mode = parse_numa_mode(variable, "HINA_NUMA", choice.error).value_or(NumaMode::kOff);
  return choice;
}

}  // namespace hina
