// Threads for a layer's workers, one for each CPU.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

#include "../native/check.h"
#include "moe/numa.h"
#include "runtime/executor.h"
#include "runtime/topology.h"

namespace guest {

using namespace hina;

// One for each CPU that this process may use, and on it. No thread begins a task when it has read more weights than
// another that still works, but for those of its last task: as if all CPUs were of one speed. Those of the guest are
// not, and what is slow here is the emulator.
class Cpus {
 public:
  explicit Cpus(const Topology& topology) : topology_(topology) {
    for (const int worker : topology.workers)
      for (const int cpu : topology.nodes[static_cast<size_t>(worker)].allowed_cpus) cpus_.push_back(cpu);
    read_.resize(cpus_.size());
  }

  int count() const { return static_cast<int>(cpus_.size()); }
  // The share of the CPUs that the worker node has.
  double share_of(int worker) const {
    const auto is_there = [&](int cpu) { return topology_.worker_of_cpu[static_cast<size_t>(cpu)] == worker; };
    return static_cast<double>(std::count_if(cpus_.begin(), cpus_.end(), is_there)) / count();
  }

  Executor executor() {
    return {this, [](void* self, auto fn, size_t total, void* data) { static_cast<Cpus*>(self)->run(fn, total, data); },
            [](void* self) { return static_cast<Cpus*>(self)->next_task(); }};
  }

  // The list that the workers of the next runs write to, all of whose entries are of worker -1 before; or nullptr.
  void watch(const Reads* reads) { reads_ = reads; }

 private:
  struct Progress {
    int64_t bytes = 0, last_task = 0;
    size_t entries = 0;  // that were looked at
  };

  void run(void (*fn)(void*, size_t), size_t total, void* data) {
    CHECK(total == cpus_.size(), "%zu workers", total);
    std::fill(read_.begin(), read_.end(), Progress());
    working_.assign(total, true);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < total; ++i)
      threads.emplace_back([this, fn, data, i] {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus_[i], &set);
        CHECK(sched_setaffinity(0, sizeof set, &set) == 0, "CPU %d", cpus_[i]);
        index_ = i;
        fn(data, i);
        const std::lock_guard<std::mutex> lock(mutex_);
        working_[i] = false;
      });
    for (std::thread& thread : threads) thread.join();
  }

  int next_task() {
    count_reads();
    for (int patience = 20000; patience > 0 && is_ahead(); --patience) usleep(500);
    return topology_.current_worker();
  }

  // Of this thread, whose entries are whole.
  void count_reads() {
    const std::lock_guard<std::mutex> lock(mutex_);
    Progress& mine = read_[index_];
    mine.last_task = -mine.bytes;
    const size_t end = reads_ == nullptr ? 0 : std::min(reads_->all.size(), static_cast<size_t>(reads_->count.load()));
    for (; mine.entries < end; ++mine.entries)
      if (const Read& read = reads_->all[mine.entries]; read.worker == static_cast<int>(index_))
        mine.bytes += read.bytes;
    mine.last_task += mine.bytes;
  }

  bool is_ahead() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < read_.size(); ++i)
      if (working_[i] && read_[i].bytes + read_[index_].last_task < read_[index_].bytes) return true;
    return false;
  }

  const Topology& topology_;
  std::vector<int> cpus_;
  std::mutex mutex_;
  std::vector<bool> working_;
  std::vector<Progress> read_;
  const Reads* reads_ = nullptr;
  static inline thread_local size_t index_ = 0;
};

}  // namespace guest
