#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <limits>
#include <sstream>
#include <system_error>

#include "base/errors.h"
#include "base/files.h"
#include "base/log.h"
#include "ckpt/training_checkpoint.h"

namespace heddle::ckpt {
namespace {

/// The process id at the end of "x.tmp-<pid>".
std::optional<pid_t> parse_owner(const std::string& name) {
  constexpr std::string_view kMark = ".tmp-";
  const auto at = name.rfind(kMark);
  if (at == std::string::npos) return std::nullopt;
  const std::string digits = name.substr(at + kMark.size());
  if (digits.empty() || digits.size() > 9 ||
      digits.find_first_not_of("0123456789") != std::string::npos) {
    return std::nullopt;
  }
  return static_cast<pid_t>(std::stol(digits));
}

constexpr double kNever = std::numeric_limits<double>::infinity();

/// Seconds since 1970 at which a process started, kNever if it has ended; nothing where /proc does
/// not say.
std::optional<double> start_time(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(stat, line)) return std::nullopt;
  // The second field is the program's name in parentheses and may hold anything; the third is the
  // state, the start is the 22nd.
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  std::string field;
  fields >> field;
  // A process that nobody has waited for writes no more.
  if (field == "Z" || field == "X") return kNever;
  for (int i = 4; i <= 22; ++i) fields >> field;
  std::ifstream system("/proc/stat");
  for (std::string key; system >> key; std::getline(system, line)) {
    double boot = 0;
    if (key == "btime" && system >> boot) {
      return boot + std::strtod(field.c_str(), nullptr) / static_cast<double>(sysconf(_SC_CLK_TCK));
    }
  }
  return std::nullopt;
}

/// Whether the process that made `path` still runs. Ids are given again, in containers soon: a
/// process that began after the last change of the folder is another one.
bool has_living_owner(const Path& path, pid_t pid) {
  if (::kill(pid, 0) != 0 && errno == ESRCH) return false;
  std::error_code error;
  const auto changed = std::filesystem::last_write_time(path, error);
  const auto started = start_time(pid);
  if (error || !started) return pid != ::getpid();
  const double changed_s =
      std::chrono::duration<double>(std::chrono::file_clock::to_sys(changed).time_since_epoch())
          .count();
  constexpr double kResolutionS = 2;  // the time of boot is known in whole seconds
  return changed_s + kResolutionS >= *started;
}

}  // namespace

std::vector<Path> remove_stale_temporaries(const Path& directory) {
  std::vector<Path> stale;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const auto owner = parse_owner(entry.path().filename().string());
    if (!owner || !entry.path().filename().string().starts_with("step-")) continue;
    if (has_living_owner(entry.path(), *owner)) {
      log::warning("{} belongs to process {}, which runs: two runs may be writing here",
                   entry.path().string(), *owner);
    } else {
      stale.push_back(entry.path());
    }
  }
  for (const Path& path : stale) {
    std::filesystem::remove_all(path, error);
    if (error) throw_error<FileError>("cannot remove {}: {}", path.string(), error.message());
  }
  return stale;
}

}  // namespace heddle::ckpt
