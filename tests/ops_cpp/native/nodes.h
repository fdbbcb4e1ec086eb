// Pages that alternate over nodes, and the shapes of real models.
#pragma once

#include "moe/partition.h"

using namespace hina;

namespace {

// A page on each node in turn, from the beginning of the page that `data` lies in.
Placement interleaved(const void* data, int nodes, int64_t page) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  Placement placement{nodes, page, address - address % static_cast<uintptr_t>(page), {}};
  for (int n = 0; n < nodes; ++n) placement.order[n] = static_cast<uint8_t>(n);
  return placement;
}

struct Model {
  const char* name;
  int64_t hidden, intermediate;
};
constexpr Model kModels[] = {{"Qwen3.6-35B-A3B", 2048, 512},
                             {"Qwen3-30B-A3B", 2048, 768},
                             {"DeepSeek-V3", 7168, 2048},
                             {"Mixtral-8x7B", 4096, 14336},
                             {"gpt-oss", 2880, 2880}};

}  // namespace
