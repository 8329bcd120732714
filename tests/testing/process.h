// This build's program as a process of its own. For tests that depend on the target `heddle`.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/inotify.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "base/text.h"
#include "testing/paths.h"

namespace heddle::testing {

/// Where the program is.
inline std::string heddle_program() { return built_path("src/cli/heddle"); }

/// Starts the program with its standard output and error in the files `out` and `err`, which may be
/// one.
inline pid_t start_heddle(const std::vector<std::string>& arguments,
                          const std::filesystem::path& out, const std::filesystem::path& err,
                          const std::map<std::string, std::string>& environment = {}) {
  std::string program = heddle_program();
  const pid_t child = fork();
  if (child != 0) return child;
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  const auto create = [](const std::filesystem::path& path) {
    return open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  };
  if (dup2(create(out), STDOUT_FILENO) < 0 ||
      dup2(err == out ? STDOUT_FILENO : create(err), STDERR_FILENO) < 0)
    _exit(126);
  std::vector<char*> argv = {program.data()};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execv(program.c_str(), argv.data());
  _exit(127);
}

/// The exit status as a shell gives it; -1: there is no such child.
inline int wait_for(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) return -1;
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/// A descriptor that can be read once the process has ended, below 0 if there is none. glibc 2.36
/// declares pidfd_open for C alone.
inline int open_process(pid_t process) {
  return static_cast<int>(syscall(SYS_pidfd_open, process, 0));
}

/// Waits until the process has ended; false: it has not within that time.
inline bool has_ended_within(pid_t process, std::chrono::milliseconds limit) {
  const int descriptor = open_process(process);
  if (descriptor < 0) return true;  // nothing of it is left
  pollfd ended = {descriptor, POLLIN, 0};
  const bool result = poll(&ended, 1, static_cast<int>(limit.count())) > 0;
  close(descriptor);
  return result;
}

/// Waits until the process has made `path`: a file that is not empty, or a folder, which it may
/// have removed again before this process looks; "step-N" is one of those, and was there if a later
/// step is. False: it ended before, or took longer than `limit`. Makes the folder that is to hold
/// it.
inline bool has_made(pid_t process, const std::filesystem::path& path,
                     std::chrono::seconds limit = std::chrono::seconds(100)) {
  std::filesystem::create_directories(path.parent_path());
  const int changes = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
  inotify_add_watch(changes, path.parent_path().c_str(), IN_CREATE | IN_MOVED_TO | IN_MODIFY);
  const int end = open_process(process);
  const auto last = std::chrono::steady_clock::now() + limit;
  const std::string name = path.filename();
  const auto is_there = [&] {
    std::error_code none;
    // Names of equal length are in the order of their steps.
    for (const auto& entry : std::filesystem::directory_iterator(path.parent_path(), none)) {
      const std::string other = entry.path().filename();
      if (name.starts_with("step-") && other.size() == name.size() && other.starts_with("step-") &&
          other > name)
        return true;
    }
    return std::filesystem::is_directory(path, none) ||
           (std::filesystem::exists(path, none) && std::filesystem::file_size(path, none) > 0);
  };
  const auto was_told_of = [&] {
    bool was_told = false;
    alignas(inotify_event) std::array<char, 4096> told;
    for (ssize_t size = 0; (size = read(changes, told.data(), told.size())) > 0;) {
      for (ssize_t at = 0; at < size;) {
        const auto* event = reinterpret_cast<const inotify_event*>(told.data() + at);
        was_told |= (event->mask & IN_ISDIR) != 0 && event->len > 0 && event->name == name;
        at += static_cast<ssize_t>(sizeof *event + event->len);
      }
    }
    return was_told;
  };
  bool is_made = is_there(), is_over = false;
  while (!is_made && !is_over) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        last - std::chrono::steady_clock::now());
    std::array<pollfd, 2> events = {pollfd{changes, POLLIN, 0}, pollfd{end, POLLIN, 0}};
    is_over =
        poll(events.data(), 2, static_cast<int>(std::max<std::int64_t>(0, left.count()))) <= 0 ||
        events[1].revents != 0;
    is_made = was_told_of() || is_there();
  }
  close(changes);
  close(end);
  return is_made;
}

/// Children of a process, in the order of their start.
inline std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> children;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream stat(entry.path() / "stat");
    std::string text;
    std::getline(stat, text);
    const auto close = text.rfind(')');
    if (close == std::string::npos) continue;
    const auto fields = text::split(text.substr(close + 2), ' ');
    if (fields.size() > 1 && std::stoi(fields[1]) == parent) children.push_back(std::stoi(name));
  }
  std::sort(children.begin(), children.end());
  return children;
}

}  // namespace heddle::testing
