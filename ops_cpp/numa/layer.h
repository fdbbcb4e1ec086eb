// What becomes of NUMA nodes in one layer: finds out where its weights are, or puts them where they shall be, and keeps
// the plan that follows from it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moe/forward.h"
#include "moe/numa.h"
#include "moe/params.h"
#include "numa/copies.h"
#include "numa/mode.h"
#include "numa/place.h"
#include "runtime/placement.h"
#include "runtime/topology.h"

namespace hina {

// Why there is nothing to do on this machine, whatever the weights; empty if there is.
std::string why_numa_is_off(const Topology& topology, NumaMode mode);

// System calls that tests replace.
struct NumaCalls {
  MovePages move_pages = hina::move_pages;
  PreferNode prefer_node = hina::prefer_node;
  int64_t (*available_memory)(const std::string& root) = hina::available_memory;
};

class LayerNuma {
 public:
  // `params` must outlive it. Modes bind and copy move and copy here; error() says what went wrong.
  LayerNuma(Topology topology, const NumaChoice& choice, const Params& params, const NumaCalls& calls = {});
  LayerNuma(const LayerNuma&) = delete;
  LayerNuma& operator=(const LayerNuma&) = delete;

  // Not empty where the mode that was asked for cannot be had and the session must not be made.
  const std::string& error() const { return error_; }

  // "numa off because ...", "numa auto on 2 nodes, ...": as things are when it is made.
  const std::string& text() const { return text_; }

  // Whether what was asked for by name cannot be had: then text(), or what look() says, is worth a line at any rate.
  bool refused() const { return refused_; }

  // Whether runs have to do with nodes at all; if not, they need call nothing of the following.
  bool active() const { return !text_.starts_with("numa off"); }

  // Before each run; several may be at once. Looks where the pages are when it is time to, and then returns what
  // text() would say now.
  std::string look();

  // Sets the plan or the copies of a call as they are now.
  void apply(Call& call) const;

  const Topology& topology() const { return topology_; }

 private:
  static std::string off(const std::string& reason);
  std::string give_up(const std::string& reason);
  std::string decide(int64_t run);
  std::string make_plan(const Placed& placed, const std::string& mode);
  void bind();
  void copy();

  const Topology topology_;
  const NumaChoice choice_;
  const Params& params_;
  const NumaCalls calls_;
  std::string error_, text_;
  std::atomic<bool> refused_{false};
  std::atomic<bool> done_{false};  // nothing is left to look for
  std::atomic<int64_t> runs_{0};
  std::atomic<bool> looking_{false};  // no mutex: glibc before 2.34 has its try_lock elsewhere
  std::unique_ptr<const NumaPlan> owned_;
  std::atomic<const NumaPlan*> plan_{nullptr};  // owned_, once it is whole
  Copies copies_;
};

}  // namespace hina
