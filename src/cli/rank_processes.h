#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace heddle::cli {

/// How one rank ended.
struct RankEnd {
  std::int64_t rank = 0;
  int status = 0;  ///< Exit status, or 128 + N for signal N.
  int signal = 0;  ///< 0 if it exited.
};

/// The processes of one host's ranks. Each is a process group of its own, so that a signal of the
/// terminal reaches the launcher alone, which hands it on; and each dies with the launcher, however
/// that ends.
class RankProcesses {
 public:
  /// Ends what still runs.
  ~RankProcesses();
  RankProcesses() = default;
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  /// Starts this program with `arguments` and further environment variables. Its output goes to
  /// `output`, or to the terminal if that is empty. Throws Error.
  void start(std::int64_t rank, const std::vector<std::string>& arguments,
             const std::map<std::string, std::string>& environment,
             const std::filesystem::path& output);
  /// The next rank that ended, without waiting.
  std::optional<RankEnd> poll();
  void signal_all(int number) const;
  /// Does nothing if the rank does not run here.
  void signal(std::int64_t rank, int number) const;
  bool empty() const { return ranks_.empty(); }

 private:
  std::map<pid_t, std::int64_t> ranks_;  ///< Running ranks by process.
};

}  // namespace heddle::cli
