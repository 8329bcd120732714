#include "reward/worker.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
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
/// More of a worker's standard error than this between two answers is not logged: a loop that
/// prints would fill the disk.
constexpr std::size_t kMostLogged = 256 << 10;
/// A process that has closed its pipes because it ends has ended so soon, on a busy machine too.
constexpr int kMomentMs = 1000;
constexpr const char* kOutputClosed = "closed its standard output";
constexpr const char* kInputClosed = "closed its standard input";

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
  // One more second of processor time: the first signal says which limit it was, the next is
  // SIGKILL.
  const auto value = static_cast<rlim_t>(most);
  const rlimit limits{value, resource == RLIMIT_CPU ? value + 1 : value};
  ::setrlimit(static_cast<__rlimit_resource>(resource), &limits);
  // SIGXCPU would leave an image of the memory behind.
  const rlimit no_core{0, 0};
  if (resource == RLIMIT_CPU) ::setrlimit(RLIMIT_CORE, &no_core);
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

void wait_for(pid_t process) {
  while (::waitpid(process, nullptr, 0) < 0 && errno == EINTR) {
  }
}

/// Adds what the system's words leave out: a file that is there cannot be found, or is no program.
std::string hint_of(const std::string& program, int reason) {
  if (reason == ENOENT && ::access(program.c_str(), F_OK) == 0)
    return "; the interpreter that its first line names is not there";
  if (reason == ENOENT && program.find(' ') != std::string::npos)
    return "; program and arguments are a list: [python3, verify.py]";
  if (reason == EACCES && ::access(program.c_str(), F_OK) == 0)
    return "; expected an executable file (chmod +x), or its interpreter before it: [python3, " +
           text::shown(program) + "]";
  return "";
}

}  // namespace

Worker::Worker(const ProcessOptions& options, std::size_t number)
    : name_(fmt::format("worker {} ({})", number, text::shown(options.command.front(), 60))),
      has_cpu_limit_(options.cpu_seconds > 0) {
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
    throw_error<ConfigError>("{}: '{}' cannot be started: {}{}", options.key,
                             text::shown(options.command.front()), std::strerror(reason),
                             hint_of(options.command.front(), reason));
  }
  input_ = Pipe::take(in.write);
  output_ = Pipe::take(out.read);
  errors_ = Pipe::take(err.read);
  start_guard();
}

Worker::~Worker() { end(); }

void Worker::start_guard() {
  Pipe pipe;
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawn_file_actions_adddup2(&actions, pipe.read, STDIN_FILENO);
  // Ctrl-C goes to the group of this program, which may end before its guards.
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  const std::string group = std::to_string(process_);
  const std::array<const char*, 6> arguments = {
      "sh", "-c", "exec >/dev/null 2>&1; read x; kill -9 -$1", "sh", group.c_str(), nullptr};
  const std::vector<char*> environment = text::environment_of_programs();
  // A machine without a shell has workers without guards.
  if (::posix_spawn(&guard_, "/bin/sh", &actions, &attributes,
                    const_cast<char* const*>(arguments.data()), environment.data()) == 0) {
    guarded_ = std::exchange(pipe.write, -1);
  } else {
    guard_ = -1;
  }
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
}

std::optional<int> Worker::status() const {
  siginfo_t info{};
  const bool has_ended =
      ::waitid(P_PID, static_cast<id_t>(process_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
      info.si_pid == process_;
  if (!has_ended) return {};
  return info.si_code == CLD_EXITED ? info.si_status : -info.si_status;
}

std::optional<int> Worker::own_status() const {
  for (int waited = 0; waited < kMomentMs; ++waited) {
    if (const auto found = status()) return found;
    ::poll(nullptr, 0, 1);
  }
  return {};
}

void Worker::finish(Clock::duration longest) {
  if (process_ < 0) return;
  to_write_.clear();
  ::close(std::exchange(input_, -1));
  // Its output is still read: it would wait for ever at a full pipe.
  for (const auto until = Clock::now() + longest; Clock::now() < until && !status();) {
    std::array<pollfd, 2> polled{{{is_gone() ? -1 : output_, POLLIN, 0}, {errors_, POLLIN, 0}}};
    ::poll(polled.data(), polled.size(), 10);
    pump();
  }
  end();
}

std::string Worker::end_gone() {
  std::string why = gone_;
  const bool may_have_ended = why == kOutputClosed || why == kInputClosed;
  if (const auto status = may_have_ended ? own_status() : std::nullopt) {
    why = *status >= 0
              ? fmt::format("ended (exit status {})", *status)
              : fmt::format("ended (signal {} ({}){})", -*status, ::strsignal(-*status),
                            *status == -SIGXCPU && has_cpu_limit_ ? ", rl.reward.cpu_seconds" : "");
  }
  end();
  return why;
}

void Worker::end() {
  if (process_ < 0) return;
  ::kill(-process_, SIGKILL);
  wait_for(std::exchange(process_, -1));
  if (guard_ > 0) {
    ::kill(guard_, SIGKILL);
    wait_for(std::exchange(guard_, -1));
    ::close(std::exchange(guarded_, -1));
  }
  if (errors_ >= 0) read_some(errors_, error_text_);
  log_errors(true);
  for (int* descriptor : {&input_, &output_, &errors_}) {
    if (*descriptor >= 0) ::close(std::exchange(*descriptor, -1));
  }
}

void Worker::write_some() {
  while (!to_write_.empty()) {
    const ssize_t count = ::write(input_, to_write_.data(), to_write_.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      if (errno != EAGAIN) gone_ = kInputClosed;
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
    log_error(line);
    begin = end + 1;
  }
  error_text_.erase(0, std::min(begin, error_text_.size()));
}

void Worker::log_error(std::string_view line) {
  if (logged_ > kMostLogged) return;
  logged_ += line.size() + 1;
  if (logged_ <= kMostLogged) {
    log::info("{}: {}", name_, text::shown(line, kLongestErrorLine));
  } else {
    log::warning(
        "{}: more than {} KiB of standard error; the rest until its next answer is left out", name_,
        kMostLogged >> 10);
  }
}

std::vector<std::string> Worker::pump() {
  write_some();
  if (errors_ >= 0 && !read_some(errors_, error_text_)) ::close(std::exchange(errors_, -1));
  log_errors(false);
  if (!read_some(output_, read_)) gone_ = kOutputClosed;
  std::vector<std::string> lines;
  std::size_t begin = 0;
  for (std::size_t end = 0; (end = read_.find('\n', begin)) != std::string::npos; begin = end + 1)
    lines.push_back(read_.substr(begin, end - begin));
  read_.erase(0, begin);
  if (read_.size() > kLongestLine)
    gone_ = fmt::format("wrote a line of more than {} MiB", kLongestLine >> 20);
  return lines;
}

}  // namespace heddle::reward
