// Countdown: how a task waits for tasks that other workers have already claimed.
//
// Waiting is only allowed for claimed work: a claimed task is being executed by a running thread, so the wait ends even
// if the pool never starts another worker. It is therefore never a barrier: a single thread finishes everything alone
// and never waits. A waiter spins briefly, since the task it waits for is short, then sleeps in the kernel. A Countdown
// must outlive every arrive() on it, also the one that ends the wait.
#pragma once

#include <atomic>
#include <cstdint>

namespace hina {

class Countdown {
 public:
  void reset(int32_t count) { left_.store(count, std::memory_order_relaxed); }

  // One task is done; true for the caller that finished the last one. What happened before is visible to waiters.
  bool arrive() {
    if (left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
    left_.notify_all();
    return true;
  }

  void wait() const {
    constexpr int kSpins = 2000;  // 20 to 100 microseconds, as long as a pause takes on this CPU
    for (int i = 0; i < kSpins; ++i) {
      if (left_.load(std::memory_order_acquire) <= 0) return;
      pause();
    }
    for (int32_t now; (now = left_.load(std::memory_order_acquire)) > 0;) left_.wait(now, std::memory_order_acquire);
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  std::atomic<int32_t> left_{0};
};

}  // namespace hina
