#pragma once

#include <cstdint>
#include <string>

namespace heddle {

/// Memory of the machine, or of this process's control group where that has less, bytes.
struct HostMemory {
  std::int64_t total = 0;
  std::int64_t available = 0;  ///< Without swapping.
};

/// `proc` and `cgroup` (version 2 or 1) are the roots of these file systems; 0 for what they do not
/// show.
HostMemory host_memory(const std::string& proc = "/proc",
                       const std::string& cgroup = "/sys/fs/cgroup");

}  // namespace heddle
