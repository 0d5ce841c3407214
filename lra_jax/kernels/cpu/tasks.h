// Work that is shared between the threads of XLA, and memory for it.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace lra {

// The threads of a pool; XLA reports 0 for a pool that it cannot ask.
inline int64_t threads_of(const xla::ffi::ThreadPool& pool) {
  return std::max<int64_t>(1, pool.num_threads());
}

// Calls work(0) ... work(count - 1), on all threads of the pool, and waits for them.
// The calling thread takes part, so that nothing waits for a thread that never comes.
template <class Work>
void in_parallel(xla::ffi::ThreadPool& pool, int64_t count, const Work& work) {
  struct Progress {
    std::atomic<int64_t> next{0};
    int64_t done = 0;
    std::mutex mutex;
    std::condition_variable changed;
  };
  auto progress = std::make_shared<Progress>();
  // A thread that comes too late finds no more work, and must not touch `work`. Without
  // memory the process ends, as other threads still use what this one would free.
  std::function<void()> turn = [progress, count, &work]() noexcept {
    for (;;) {
      const int64_t index = progress->next.fetch_add(1);
      if (index >= count) return;
      work(index);
      const std::lock_guard<std::mutex> lock(progress->mutex);
      if (++progress->done == count) progress->changed.notify_all();
    }
  };
  const int64_t threads = std::min(threads_of(pool), count);
  for (int64_t other = 1; other < threads; other++)
    pool.Schedule(std::function<void()>(turn));
  turn();
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->changed.wait(lock, [&] { return progress->done == count; });
}

// Arrays of floats, aligned to cache lines, freed together.
class Room {
 public:
  // Zeroed.
  float* take(int64_t size) {
    float* part = take_unset(size);
    std::fill(part, part + size, 0.0f);
    return part;
  }
  float* take_unset(int64_t size) {
    const size_t bytes = (size * sizeof(float) + 63) / 64 * 64;
    parts_.emplace_back(static_cast<float*>(::operator new(bytes, kAligned)));
    return parts_.back().get();
  }

 private:
  static constexpr std::align_val_t kAligned{64};
  struct Free {
    void operator()(float* part) const { ::operator delete(part, kAligned); }
  };
  std::vector<std::unique_ptr<float, Free>> parts_;
};

}  // namespace lra
