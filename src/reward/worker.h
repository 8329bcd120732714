#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "reward/reward.h"

namespace heddle::reward {

using Clock = std::chrono::steady_clock;

/// One process of the user, in a process group of its own, that reads lines and writes lines. Its
/// standard error goes to the log. It is killed, with all that it started, at the end of this
/// object's life and at the end of the thread that made it.
class Worker {
 public:
  /// Throws ConfigError if the program cannot be started.
  Worker(const ProcessOptions& options, std::size_t number);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Queues a line; pump() writes it.
  void send(const std::string& line) { to_write_ += line + '\n'; }
  bool has_to_write() const { return !to_write_.empty(); }
  int input() const { return input_; }    ///< To be polled for writing.
  int output() const { return output_; }  ///< To be polled for reading.
  int errors() const { return errors_; }  ///< To be polled for reading, or -1 once it is closed.

  /// Reads and writes what does not block; returns the whole lines that came.
  std::vector<std::string> pump();
  /// It closed its output or its input: it has ended or no longer speaks.
  bool is_gone() const { return is_gone_; }
  /// Ends it and says how it ended: "exit status 1", "signal 9 (Killed)".
  std::string end();

 private:
  void write_some();
  /// Appends what is there to `text`; false at the end of the stream.
  bool read_some(int descriptor, std::string& text);
  void log_errors(bool is_last);

  std::string name_;
  pid_t process_ = -1;
  int input_ = -1, output_ = -1, errors_ = -1;
  std::string to_write_, read_, error_text_;
  bool is_gone_ = false;
};

}  // namespace heddle::reward
