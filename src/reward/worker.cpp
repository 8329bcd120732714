#include "reward/worker.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "base/quote.h"
#include "base/secret.h"

namespace heddle::reward {
namespace {

/// A line longer than this is no answer.
constexpr std::size_t kLongestLine = 16 << 20;
constexpr std::size_t kLongestErrorLine = 4096;

/// Both ends are closed at their end of life and in programs that are started.
struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0)
      throw_error<Error>("a pipe to a reward worker: {}", std::strerror(errno));
    read = ends[0];
    write = ends[1];
  }
  ~Pipe() {
    if (read >= 0) ::close(read);
    if (write >= 0) ::close(write);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  /// Gives an end away, as one that does not block.
  static int take(int& end) {
    ::fcntl(end, F_SETFL, ::fcntl(end, F_GETFL) | O_NONBLOCK);
    return std::exchange(end, -1);
  }
};

void limit(int resource, std::int64_t most) {
  if (most <= 0) return;
  const rlimit value{static_cast<rlim_t>(most), static_cast<rlim_t>(most)};
  ::setrlimit(static_cast<__rlimit_resource>(resource), &value);
}

/// In the new process; only calls that are safe after a fork of a program with threads.
[[noreturn]] void become(const ProcessOptions& options, char* const* arguments,
                         char* const* environment, const Pipe& in, const Pipe& out, const Pipe& err,
                         int failed) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  // Ctrl-C stops the run, which then ends its workers; a handler of the run is not for them.
  for (const int number : {SIGINT, SIGTERM, SIGPIPE}) ::signal(number, SIG_DFL);
  limit(RLIMIT_AS, options.memory_bytes);
  limit(RLIMIT_CPU, options.cpu_seconds);
  ::dup2(in.read, STDIN_FILENO);
  ::dup2(out.write, STDOUT_FILENO);
  ::dup2(err.write, STDERR_FILENO);
  ::execvpe(arguments[0], arguments, environment);
  const int reason = errno;
  [[maybe_unused]] const ssize_t count = ::write(failed, &reason, sizeof reason);
  ::_exit(127);
}

}  // namespace

Worker::Worker(const ProcessOptions& options, std::size_t number)
    : name_(fmt::format("worker {} ({})", number, options.command.front())) {
  std::vector<char*> arguments;
  for (const std::string& argument : options.command)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  const std::vector<char*> environment = text::environment_of_programs();
  Pipe in, out, err, failed;
  process_ = ::fork();
  if (process_ < 0) throw_error<Error>("{}: cannot be started: {}", name_, std::strerror(errno));
  if (process_ == 0)
    become(options, arguments.data(), environment.data(), in, out, err, failed.write);
  ::close(std::exchange(failed.write, -1));
  int reason = 0;
  // Ends at once: exec closes the other side.
  if (::read(failed.read, &reason, sizeof reason) == sizeof reason) {
    ::waitpid(process_, nullptr, 0);
    throw_error<ConfigError>("{}: '{}' cannot be started: {}", options.key,
                             text::shown(options.command.front()), std::strerror(reason));
  }
  input_ = Pipe::take(in.write);
  output_ = Pipe::take(out.read);
  errors_ = Pipe::take(err.read);
}

Worker::~Worker() { end(); }

std::string Worker::end() {
  if (process_ < 0) return "ended";
  ::kill(-process_, SIGKILL);
  // A process that ended by itself before keeps its own status.
  int status = 0;
  while (::waitpid(process_, &status, 0) < 0 && errno == EINTR) {
  }
  process_ = -1;
  if (errors_ >= 0) read_some(errors_, error_text_);
  log_errors(true);
  for (int* descriptor : {&input_, &output_, &errors_}) {
    if (*descriptor >= 0) ::close(std::exchange(*descriptor, -1));
  }
  if (WIFEXITED(status)) return fmt::format("exit status {}", WEXITSTATUS(status));
  return fmt::format("signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
}

void Worker::write_some() {
  while (!to_write_.empty()) {
    const ssize_t count = ::write(input_, to_write_.data(), to_write_.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      if (errno != EAGAIN) is_gone_ = true;
      return;
    }
    to_write_.erase(0, static_cast<std::size_t>(count));
  }
}

bool Worker::read_some(int descriptor, std::string& text) {
  std::array<char, 1 << 16> buffer{};
  while (true) {
    const ssize_t count = ::read(descriptor, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno == EAGAIN;
    if (count == 0) return false;
    text.append(buffer.data(), static_cast<std::size_t>(count));
    if (text.size() > kLongestLine) return true;
  }
}

void Worker::log_errors(bool is_last) {
  std::size_t begin = 0;
  while (begin < error_text_.size()) {
    std::size_t end = error_text_.find('\n', begin);
    if (end == std::string::npos) {
      if (!is_last && error_text_.size() - begin < kLongestErrorLine) break;
      end = error_text_.size();
    }
    const std::string_view line = std::string_view(error_text_).substr(begin, end - begin);
    log::info("{}: {}", name_, text::shown(line, kLongestErrorLine));
    begin = end + 1;
  }
  error_text_.erase(0, std::min(begin, error_text_.size()));
}

std::vector<std::string> Worker::pump() {
  write_some();
  if (errors_ >= 0 && !read_some(errors_, error_text_)) ::close(std::exchange(errors_, -1));
  log_errors(false);
  if (!read_some(output_, read_)) is_gone_ = true;
  std::vector<std::string> lines;
  std::size_t begin = 0;
  for (std::size_t end = 0; (end = read_.find('\n', begin)) != std::string::npos; begin = end + 1)
    lines.push_back(read_.substr(begin, end - begin));
  read_.erase(0, begin);
  if (read_.size() > kLongestLine) is_gone_ = true;
  return lines;
}

}  // namespace heddle::reward
