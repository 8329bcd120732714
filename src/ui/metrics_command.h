#pragma once

#include <string>
#include <string_view>

#include <sys/types.h>

namespace heddle::ui {

/// A process of the user that gets lines on its standard input, for example to send metrics
/// elsewhere. It runs in a process group of its own: Ctrl-C stops the run, and the process when its
/// input ends. A process that ends or does not read costs a warning and the further lines, never
/// the run.
class MetricsCommand {
 public:
  /// Starts `/bin/sh -c command`. Throws Error if that fails.
  explicit MetricsCommand(const std::string& command);
  /// Ends the input and waits for the process, ten seconds at most.
  ~MetricsCommand();
  MetricsCommand(const MetricsCommand&) = delete;
  MetricsCommand& operator=(const MetricsCommand&) = delete;

  void write(std::string_view line);

 private:
  void give_up(const char* why);

  std::string command_;
  int input_ = -1;
  pid_t process_ = -1;
};

}  // namespace heddle::ui
