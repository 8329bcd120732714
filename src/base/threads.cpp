#include "base/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace heddle {

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

void parallel_items(std::int64_t count, int threads,
                    const std::function<void(std::int64_t)>& body) {
  std::atomic<std::int64_t> next = 0;
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto work = [&] {
    for (std::int64_t i = next++; i < count; i = next++) {
      try {
        body(i);
      } catch (...) {
        const std::scoped_lock lock(failure_mutex);
        if (!failure) failure = std::current_exception();
        next = count;
      }
    }
  };
  const auto workers = static_cast<int>(std::min<std::int64_t>(threads, count));
  std::vector<std::jthread> pool;
  for (int i = 1; i < workers; ++i) pool.emplace_back(work);
  work();
  pool.clear();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace heddle
