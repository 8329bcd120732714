#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
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
  /// It closed its output or its input, or wrote a line without an end: it no longer speaks.
  bool is_gone() const { return !gone_.empty(); }
  /// Ends it, and says why it is gone: "ended (exit status 1)", "closed its standard output".
  std::string end_gone();
  /// Ends its standard input, and ends it once it has had so long to end by itself.
  void finish(Clock::duration longest);
  /// Ends it at once.
  void end();

  /// Its standard error goes to the log again, if it had written too much.
  void has_answered() { logged_ = 0; }
  const std::string& name() const { return name_; }

 private:
  void start_guard();
  /// Its exit status, or the negative signal that ended it; nullopt while it is there.
  std::optional<int> status() const;
  /// Its status(), for which a moment is waited at most.
  std::optional<int> own_status() const;
  void write_some();
  /// Appends what is there to `text`; false at the end of the stream.
  bool read_some(int descriptor, std::string& text);
  void log_errors(bool is_last);
  void log_error(std::string_view line);

  std::string name_;
  bool has_cpu_limit_;
  pid_t process_ = -1;
  /// Ends the worker's process group when this program is killed: the system ends the worker alone.
  pid_t guard_ = -1;
  int guarded_ = -1;  ///< The guard waits for the end of this pipe.
  int input_ = -1, output_ = -1, errors_ = -1;
  std::string to_write_, read_, error_text_;
  std::string gone_;        ///< Why it no longer speaks; empty: it does.
  std::size_t logged_ = 0;  ///< Bytes of its standard error since its last answer.
};

}  // namespace heddle::reward
