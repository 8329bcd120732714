#include "cli/rank_processes.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/errors.h"
#include "base/files.h"

extern char** environ;

namespace heddle::cli {
namespace {

/// "NAME=value" of this process's environment, overridden by `more`.
std::vector<std::string> merged_environment(const std::map<std::string, std::string>& more) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!more.contains(text.substr(0, text.find('=')))) all.push_back(text);
  }
  for (const auto& [name, value] : more) all.push_back(name + "=" + value);
  return all;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (std::string& text : texts) list.push_back(text.data());
  list.push_back(nullptr);
  return list;
}

/// In the child, between fork and exec: only calls that are safe there.
[[noreturn]] void become(const char* program, char** arguments, char** environment, int output,
                         pid_t launcher) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(1);  // it died before the line above
  setpgid(0, 0);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (output >= 0) {
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
  }
  execve(program, arguments, environment);
  _exit(127);
}

}  // namespace

RankProcesses::~RankProcesses() {
  signal_all(SIGKILL);
  for (const auto& [pid, rank] : ranks_) waitpid(pid, nullptr, 0);
}

void RankProcesses::start(std::int64_t rank, const std::vector<std::string>& arguments,
                          const std::map<std::string, std::string>& environment,
                          const std::filesystem::path& output) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  std::vector<std::string> words = {program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<std::string> variables = merged_environment(environment);
  const std::vector<char*> argv = pointers(words), envp = pointers(variables);
  int descriptor = -1;
  if (!output.empty()) {
    descriptor = files::open_to_append(output);
    if (ftruncate(descriptor, 0) != 0) {
      throw_error<FileError>("cannot write {}: {}", output.string(), std::strerror(errno));
    }
  }
  const pid_t launcher = getpid();
  const pid_t child = fork();
  if (child == 0) {
    become(program.c_str(), const_cast<char**>(argv.data()), const_cast<char**>(envp.data()),
           descriptor, launcher);
  }
  if (descriptor >= 0) close(descriptor);
  if (child < 0) throw_error<Error>("cannot start rank {}: {}", rank, std::strerror(errno));
  setpgid(child, child);  // as in the child, whichever comes first
  ranks_[child] = rank;
}

std::optional<RankEnd> RankProcesses::poll() {
  for (const auto& [pid, rank] : ranks_) {
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) != pid) continue;
    RankEnd end{rank, WEXITSTATUS(status), 0};
    if (WIFSIGNALED(status)) {
      end.signal = WTERMSIG(status);
      end.status = 128 + end.signal;
    }
    ranks_.erase(pid);
    return end;
  }
  return std::nullopt;
}

void RankProcesses::signal_all(int number) const {
  for (const auto& [pid, rank] : ranks_) kill(pid, number);
}

void RankProcesses::signal(std::int64_t rank, int number) const {
  for (const auto& [pid, running] : ranks_) {
    if (running == rank) kill(pid, number);
  }
}

}  // namespace heddle::cli
