#include "base/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/control_group.h"

namespace heddle {

int available_cores() {
  cpu_set_t set;
  int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  // Rounded down: threads beyond a quota are stopped, and the others wait for them.
  static const std::optional<double> quota = control_group_limits().cores;
  if (quota) cores = std::min(cores, static_cast<int>(std::min(*quota, 1e6)));
  return std::max(1, cores);
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
