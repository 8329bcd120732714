#pragma once

#include <atomic>
#include <csignal>

namespace heddle::cli {

/// While it lives, the first SIGINT, SIGTERM or SIGHUP (unless that was ignored, as nohup does)
/// asks for a clean stop (finish the step, save), and a second one ends the process at once with
/// status 128 + N. One at a time in a process, as signals are.
class StopRequest {
 public:
  /// The first signal writes `notice` to the standard error at once, unless it is null: what was
  /// asked for may take a while. The text lives as long as the program.
  explicit StopRequest(const char* notice = nullptr);
  /// Signals do again what they did before.
  ~StopRequest();
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  /// Becomes true with the first signal; for loops that must not know of signals.
  const std::atomic<bool>& flag() const;
  /// The signal that asked, 0 if none has.
  int signal() const;

 private:
  struct sigaction old_interrupt_ {};
  struct sigaction old_terminate_ {};
  struct sigaction old_hang_up_ {};
};

}  // namespace heddle::cli
