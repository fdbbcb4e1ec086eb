#include "numa/layer.h"

#include <cstdio>

namespace hina {
namespace {

constexpr int64_t kLastLook = 1 << 20;  // the last run before which auto looks for the pages
constexpr int64_t kPatience = 64;       // likewise of interleave: experts that no token chose until then matter little

std::string mebibytes(int64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

std::string nodes_text(const Topology& topology) {
  std::string text = topology.workers.size() == 1 ? "node " : "nodes ";
  for (const int id : topology.worker_ids()) text += (text.back() == ' ' ? "" : ", ") + std::to_string(id);
  return text;
}

}  // namespace

std::string why_numa_is_off(const Topology& topology, NumaMode mode) {
  if (mode == NumaMode::kOff) return "it was asked for";
  const size_t nodes = topology.workers.size();
  if (nodes < 2) return "this process may run on one node alone";
  if (nodes > kMaxNodes) return "there are more than " + std::to_string(kMaxNodes) + " nodes to run on";
  if (mode != NumaMode::kBind && mode != NumaMode::kCopy) return {};
  for (const int worker : topology.workers)
    if (const NumaNode& node = topology.nodes[static_cast<size_t>(worker)]; !node.memory_allowed)
      return "node " + std::to_string(node.id) + " has no memory that this process may use";
  return {};
}

LayerNuma::LayerNuma(Topology topology, const NumaChoice& choice, const Params& params, const NumaCalls& calls)
    : topology_(std::move(topology)), choice_(choice), params_(params), calls_(calls), error_(choice.error) {
  const bool waits = choice.mode == NumaMode::kAuto || choice.mode == NumaMode::kInterleave;
  if (const std::string reason = why_numa_is_off(topology_, choice.mode); !reason.empty()) {
    text_ = off(reason);
  } else if (choice.mode == NumaMode::kBind) {
    bind();
  } else if (choice.mode == NumaMode::kCopy) {
    copy();
  } else {
    text_ = std::string("numa ") + numa_mode_name(choice.mode) + " on " + nodes_text(topology_) +
            ", looks for the pages before the first run";
  }
  done_ = !waits || text_.starts_with("numa off");
}

std::string LayerNuma::off(const std::string& reason) { return "numa off because " + reason; }

std::string LayerNuma::give_up(const std::string& reason) {
  done_ = true;
  refused_ = choice_.mode != NumaMode::kAuto;
  return off(reason);
}

std::string LayerNuma::look() {
  if (done_.load(std::memory_order_relaxed)) return {};
  const int64_t run = runs_.fetch_add(1, std::memory_order_relaxed) + 1;
  if ((run & (run - 1)) != 0) return {};
  if (looking_.exchange(true, std::memory_order_acquire)) return {};
  std::string news = done_ ? std::string() : decide(run);
  looking_.store(false, std::memory_order_release);
  return news;
}

std::string LayerNuma::decide(int64_t run) {
  const int64_t blocks = block_count(params_);
  const bool any = choice_.mode == NumaMode::kInterleave;
  const Placed placed =
      find_weights(params_, topology_, static_cast<int>(any ? blocks : blocks / 10), calls_.move_pages);
  if (placed.refused) return give_up(placed.reason);
  if (placed.found * 10 < blocks * 9) {
    const std::string reason = std::to_string(placed.found) + " of the first " + std::to_string(placed.blocks) +
                               " matrices lie in a pattern: " + placed.reason;
    if (placed.absent > 0 && run < (any ? kPatience : kLastLook))
      return off(reason + "; looks again before run " + std::to_string(2 * run));
    if (!any || placed.found == 0) return give_up(reason);
  }
  if (const int only = placed.only_node(); only >= 0)
    return give_up("all weights are on node " + std::to_string(topology_.worker_ids()[static_cast<size_t>(only)]));
  return make_plan(placed, "numa interleave");
}

std::string LayerNuma::make_plan(const Placed& placed, const std::string& mode) {
  owned_ = make_numa_plan(params_, static_cast<int>(topology_.workers.size()), placed.experts);
  done_ = true;
  if (owned_ == nullptr) return give_up("its weights cannot be cut by their pages with a gain");
  char locality[16];
  std::snprintf(locality, sizeof locality, "%.1f %%", 100.0 * owned_->locality);
  plan_ = owned_.get();
  return mode + " on " + nodes_text(topology_) + ", " + std::to_string(placed.found) + " of " +
         std::to_string(placed.blocks) + " matrices in a pattern, " + locality + " of the bytes local";
}

void LayerNuma::bind() {
  const Placed placed = spread_weights(params_, topology_, calls_.move_pages);
  text_ = placed.refused || placed.found == 0 ? give_up(placed.reason) : make_plan(placed, "numa bind");
}

void LayerNuma::copy() {
  const std::vector<int> nodes = topology_.worker_ids();
  const int64_t bytes = bytes_of_copy(params_) * static_cast<int64_t>(nodes.size());
  if (const int64_t available = calls_.available_memory(""); available > 0 && bytes > available) {
    error_ = "numa mode copy needs " + mebibytes(bytes) + " for the copies of this layer, but " + mebibytes(available) +
             " are available: choose another mode (HINA_NUMA or hina.numa)";
    return;
  }
  const std::string reason = copies_.make(params_, nodes, calls_.prefer_node);
  text_ = reason.empty() ? "numa copy on " + nodes_text(topology_) + ", " + mebibytes(bytes) + " of copies"
                         : give_up(reason);
}

void LayerNuma::apply(Call& call) const {
  call.numa = plan_.load(std::memory_order_acquire);
  call.copies = copies_.empty() ? nullptr : copies_.params();
}

}  // namespace hina
