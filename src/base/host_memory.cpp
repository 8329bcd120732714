#include "base/host_memory.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>

namespace heddle {
namespace {

std::optional<std::int64_t> integer(std::istream& in) {
  std::int64_t value = 0;
  return in >> value ? std::optional(value) : std::nullopt;
}

/// Of the lines "MemTotal:   1000 kB".
std::int64_t meminfo(const std::string& proc, const std::string& key) {
  std::ifstream in(proc + "/meminfo");
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key + ":")) continue;
    std::istringstream value(line.substr(key.size() + 1));
    return integer(value).value_or(0) * 1024;
  }
  return 0;
}

/// Nothing if it is "max" or absent.
std::optional<std::int64_t> cgroup_value(const std::string& root, const char* v2, const char* v1) {
  for (const char* name : {v2, v1}) {
    std::ifstream in(root + "/" + name);
    if (in) return integer(in);
  }
  return {};
}

}  // namespace

HostMemory host_memory(const std::string& proc, const std::string& cgroup) {
  HostMemory memory{meminfo(proc, "MemTotal"), meminfo(proc, "MemAvailable")};
  const auto limit = cgroup_value(cgroup, "memory.max", "memory/memory.limit_in_bytes");
  if (!limit || *limit >= memory.total) return memory;
  const auto used = cgroup_value(cgroup, "memory.current", "memory/memory.usage_in_bytes");
  memory.total = *limit;
  memory.available =
      std::min(memory.available, std::max<std::int64_t>(0, *limit - used.value_or(0)));
  return memory;
}

}  // namespace heddle
