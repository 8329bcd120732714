#include "ui/metrics_command.h"

#include <errno.h>
#include <spawn.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "base/errors.h"
#include "base/log.h"
#include "base/secret.h"

namespace heddle::ui {
namespace {

/// Longest that a line waits for a process that is slow to read.
constexpr int kWriteSeconds = 5;
constexpr std::chrono::seconds kEndSeconds{10};

}  // namespace

MetricsCommand::MetricsCommand(const std::string& command) : command_(command) {
  // A socket rather than a pipe: a reader that is gone is an error then and no signal.
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw_error<Error>("log.command: cannot make a socket: {}", strerror(errno));
  const timeval limit{kWriteSeconds, 0};
  setsockopt(ends[0], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  std::string shell = "/bin/sh", option = "-c";
  char* const arguments[] = {shell.data(), option.data(), command_.data(), nullptr};
  const int error = posix_spawn(&process_, shell.c_str(), &actions, &attributes, arguments,
                                text::environment_of_programs().data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  close(ends[1]);
  input_ = ends[0];
  if (error == 0) return;
  close(input_);
  throw_error<Error>("log.command: cannot start '{}': {}", command_, strerror(error));
}

MetricsCommand::~MetricsCommand() {
  if (input_ >= 0) close(input_);
  const auto end = std::chrono::steady_clock::now() + kEndSeconds;
  int status = 0;
  while (waitpid(process_, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > end) {
      log::warning("log.command: '{}' has not ended after {} s; it is left to itself", command_,
                   kEndSeconds.count());
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
    log::warning("log.command: '{}' ended with status {}", command_, WEXITSTATUS(status));
}

void MetricsCommand::write(std::string_view line) {
  if (input_ < 0) return;
  std::string text(line);
  text += '\n';
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t sent = send(input_, text.data() + done, text.size() - done, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return give_up(errno == EAGAIN ? "it does not read" : strerror(errno));
    done += static_cast<std::size_t>(sent);
  }
}

void MetricsCommand::give_up(const char* why) {
  log::warning("log.command: '{}' gets no more metrics: {}", command_, why);
  close(input_);
  input_ = -1;
}

}  // namespace heddle::ui
