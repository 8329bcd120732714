#include "base/control_group.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

#include "base/text.h"

namespace heddle {
namespace {

namespace fs = std::filesystem;

/// Nothing if the file is absent or does not begin with a number ("max").
template <class T>
std::optional<T> number_in(const fs::path& file) {
  std::ifstream in(file);
  T value{};
  return in >> value ? std::optional(value) : std::nullopt;
}

/// Reads lines such as "inactive_file 4096".
std::int64_t entry_in(const fs::path& file, const std::string& key) {
  std::ifstream in(file);
  std::string name;
  for (std::int64_t value = 0; in >> name >> value;) {
    if (name == key) return value;
  }
  return 0;
}

/// The group of this process that a controller limits, "/a/b"; "" of version 2 is its one
/// hierarchy. Nothing if /proc does not say.
std::optional<std::string> group_of(const std::string& proc, const std::string& controller) {
  std::ifstream in(proc + "/self/cgroup");
  for (std::string line; std::getline(in, line);) {  // "4:cpu,cpuacct:/a/b" or "0::/a/b"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    const std::vector<std::string> controllers = text::split(names, ',');
    const bool is_it = controller.empty() ? names.empty()
                                          : std::find(controllers.begin(), controllers.end(),
                                                      controller) != controllers.end();
    if (is_it) return line.substr(second + 1);
  }
  return std::nullopt;
}

/// The folders of a group and of those above it, up to the mount point. A container often sees its
/// own group as the mount point, under a name of the host that is not there.
std::vector<fs::path> levels(const fs::path& mount, const std::optional<std::string>& group) {
  std::error_code ignored;
  fs::path level = mount;
  if (group && group->find("..") == std::string::npos) level += *group;
  std::vector<fs::path> found;
  if (fs::is_directory(level, ignored)) {
    for (; level.string().size() > mount.string().size(); level = level.parent_path())
      found.push_back(level);
  }
  found.push_back(mount);
  return found;
}

void limit_cores(ControlGroupLimits& limits, std::optional<double> quota,
                 std::optional<double> period) {
  if (!quota || !period || *quota <= 0 || *period <= 0) return;
  limits.cores = std::min(limits.cores.value_or(*quota / *period), *quota / *period);
}

void limit_memory(ControlGroupLimits& limits, std::optional<std::int64_t> limit,
                  std::optional<std::int64_t> used, std::int64_t droppable) {
  if (!limit) return;
  const std::int64_t left =
      std::max<std::int64_t>(0, *limit - std::max<std::int64_t>(0, used.value_or(0) - droppable));
  if (limits.memory_available && left >= *limits.memory_available) return;
  limits.memory_available = left;
  limits.memory_total = *limit;
}

}  // namespace

ControlGroupLimits control_group_limits(const std::string& proc, const std::string& cgroup) {
  ControlGroupLimits limits;
  // Version 2 stands at the root, or beside version 1 in "unified".
  const bool is_hybrid = fs::exists(cgroup + "/unified");
  for (const fs::path& level :
       levels(is_hybrid ? cgroup + "/unified" : cgroup, group_of(proc, ""))) {
    std::ifstream cpu(level / "cpu.max");
    double quota = 0, period = 0;
    if (cpu >> quota >> period) limit_cores(limits, quota, period);
    limit_memory(limits, number_in<std::int64_t>(level / "memory.max"),
                 number_in<std::int64_t>(level / "memory.current"),
                 entry_in(level / "memory.stat", "inactive_file"));
  }
  for (const fs::path& level : levels(cgroup + "/cpu", group_of(proc, "cpu"))) {
    limit_cores(limits, number_in<double>(level / "cpu.cfs_quota_us"),
                number_in<double>(level / "cpu.cfs_period_us"));
  }
  for (const fs::path& level : levels(cgroup + "/memory", group_of(proc, "memory"))) {
    limit_memory(limits, number_in<std::int64_t>(level / "memory.limit_in_bytes"),
                 number_in<std::int64_t>(level / "memory.usage_in_bytes"),
                 entry_in(level / "memory.stat", "total_inactive_file"));
  }
  return limits;
}

}  // namespace heddle
