#pragma once

#include <cstdint>
#include <functional>

namespace heddle {

/// Cores this process may keep busy: its affinity mask and the CPU quota of its control groups, not
/// the machine's total.
int available_cores();

/// Calls body(i) for every i in [0, count) on up to `threads` threads, each item whole on one
/// thread; rethrows the first exception after all threads have ended. For host work such as
/// tokenizing; tensor kernels use at::parallel_for.
void parallel_items(std::int64_t count, int threads, const std::function<void(std::int64_t)>& body);

}  // namespace heddle
