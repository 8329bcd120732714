#include "base/host_memory.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/control_group.h"

namespace heddle {
namespace {

std::optional<std::int64_t> integer(std::istream& in) {
  std::int64_t value = 0;
  return in >> value ? std::optional(value) : std::nullopt;
}

/// Reads lines such as "MemTotal:   1000 kB".
std::int64_t meminfo(const std::string& proc, const std::string& key) {
  std::ifstream in(proc + "/meminfo");
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key + ":")) continue;
    std::istringstream value(line.substr(key.size() + 1));
    return integer(value).value_or(0) * 1024;
  }
  return 0;
}

}  // namespace

HostMemory host_memory(const std::string& proc, const std::string& cgroup) {
  HostMemory memory{meminfo(proc, "MemTotal"), meminfo(proc, "MemAvailable")};
  const ControlGroupLimits limits = control_group_limits(proc, cgroup);
  // Version 1 writes a number beyond any machine where there is no limit.
  if (limits.memory_total) memory.total = std::min(memory.total, *limits.memory_total);
  if (limits.memory_available)
    memory.available = std::min(memory.available, *limits.memory_available);
  return memory;
}

}  // namespace heddle
