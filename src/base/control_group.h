#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace heddle {

/// Limits of the control groups that this process is in: the least of its own and of all groups
/// above it, of version 1 or 2 (docker --cpus, Kubernetes limits, systemd, Slurm).
struct ControlGroupLimits {
  std::optional<double> cores;  ///< CPU time per time: 0.5 is half of one core.
  /// Bytes of the group that has the fewest left, and what of them is left when the page cache that
  /// can be dropped at once does not count.
  std::optional<std::int64_t> memory_total, memory_available;
};

/// `proc` and `cgroup` are the roots of these file systems.
ControlGroupLimits control_group_limits(const std::string& proc = "/proc",
                                        const std::string& cgroup = "/sys/fs/cgroup");

}  // namespace heddle
