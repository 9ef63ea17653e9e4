// The helpers of pool.h: they look out for work for a moment, then sleep until they are called.
#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<uint32_t>;

// A helper looks out for so long: longer than the pauses within a step, much shorter than a step.
constexpr std::chrono::microseconds kLookOut{100};
// So long the caller looks out for helpers that are at their last unit; then it gives its core up.
constexpr std::chrono::microseconds kPatience{30};
constexpr uint32_t kOpen = 1u << 31;  // of the gate; the other bits count the helpers inside
constexpr int kMostHelpers = 255;

void sleep_while(Word& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr,
          nullptr, 0);
}

void wake(Word& word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr,
          nullptr, 0);
}

// Whether `done` came true within the time.
template <class Done>
bool look_out(std::chrono::microseconds limit, const Done& done) {
  const auto end = Clock::now() + limit;
  do {
    for (int turn = 0; turn < 64; turn++) {
      if (done()) return true;
      _mm_pause();
    }
  } while (Clock::now() < end);
  return false;
}

class Pool {
 public:
  void run(int64_t units, UnitBody body, const void* with, int threads) {
    std::unique_lock<std::mutex> mine(owner_, std::try_to_lock);
    if (!mine.owns_lock()) {
      for (int64_t unit = 0; unit < units; unit++) body(with, unit);
      return;
    }
    // Nobody is inside: the job can be changed.
    const int helpers = std::min<int>({threads - 1, kMostHelpers, static_cast<int>(units - 1)});
    while (started_ < helpers) start_one();
    body_ = body, with_ = with, units_ = units;
    next_.store(0, std::memory_order_relaxed);
    limit_.store(helpers, std::memory_order_relaxed);
    gate_.store(kOpen, std::memory_order_release);
    bell_.fetch_add(1);
    if (sleepers_.load() > 0) wake(bell_, helpers);
    work();
    gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    const auto empty = [&] { return gate_.load(std::memory_order_acquire) == 0; };
    while (!look_out(kPatience, empty)) {
      waiting_.store(true);
      const uint32_t inside = gate_.load();
      if (inside != 0) sleep_while(gate_, inside);
      waiting_.store(false);
    }
  }

 private:
  void work() {
    for (;;) {
      const int64_t unit = next_.fetch_add(1, std::memory_order_relaxed);
      if (unit >= units_) return;
      body_(with_, unit);
    }
  }

  // Inside the job that is open now, whichever that is; false when there is none or no room.
  bool enter() {
    uint32_t now = gate_.load(std::memory_order_relaxed);
    while ((now & kOpen) && static_cast<int>(now & ~kOpen) < limit_.load()) {
      if (gate_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  void help() {
    uint32_t seen = bell_.load();
    for (;;) {
      if (enter()) {
        work();
        if (gate_.fetch_sub(1) == 1 && waiting_.load()) wake(gate_, 1);
      }
      const auto rung = [&] { return bell_.load(std::memory_order_acquire) != seen; };
      if (!look_out(kLookOut, rung)) {
        sleepers_.fetch_add(1);
        sleep_while(bell_, seen);
        sleepers_.fetch_sub(1);
      }
      seen = bell_.load();
    }
  }

  void start_one() {
    // Signals are for the interpreter's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread helper([this] { help(); });
    pthread_setname_np(helper.native_handle(), "quire-kernels");
    helper.detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    started_++;
  }

  std::mutex owner_;
  int started_ = 0;
  UnitBody body_ = nullptr;
  const void* with_ = nullptr;
  int64_t units_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) Word gate_{0};  // open, and how many helpers are inside
  std::atomic<bool> waiting_{false};  // the caller sleeps until the gate is empty
  alignas(64) Word bell_{0};  // rises with every job
  std::atomic<int> sleepers_{0}, limit_{0};
};

// Lives as long as the process, as its threads do; a forked child has none and begins anew.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool.store(new Pool);
    pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool); });
  });
  return *pool.load(std::memory_order_acquire);
}

}  // namespace

int num_threads() { return omp_get_max_threads(); }

void share_out(int64_t units, UnitBody body, const void* with) {
  const int threads = num_threads();
  if (threads <= 1 || units <= 1) {
    for (int64_t unit = 0; unit < units; unit++) body(with, unit);
    return;
  }
  the_pool().run(units, body, with, threads);
}

}  // namespace quire
