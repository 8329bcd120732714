#include "cli/stop_request.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/errors.h"

namespace heddle::cli {
namespace {

// A signal handler has no other way to reach what it must set.
std::atomic<bool> g_requested = false;
std::atomic<int> g_signal = 0;
std::atomic<bool> g_installed = false;
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

std::atomic<const char*> g_notice = nullptr;
static_assert(std::atomic<const char*>::is_always_lock_free);

void on_signal(int number) {
  int none = 0;
  if (!g_signal.compare_exchange_strong(none, number)) _exit(128 + number);
  g_requested = true;
  const char* const notice = g_notice;
  if (notice == nullptr) return;
  const int kept = errno;
  [[maybe_unused]] const ssize_t count = ::write(STDERR_FILENO, notice, std::strlen(notice));
  errno = kept;
}

}  // namespace

StopRequest::StopRequest(const char* notice) {
  if (g_installed.exchange(true)) throw InternalError("two StopRequests live at the same time");
  g_requested = false;
  g_signal = 0;
  g_notice = notice;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // a write of the run in progress is not torn by the request
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, &old_interrupt_);
  sigaction(SIGTERM, &action, &old_terminate_);
  // A terminal that is closed; nohup has the signal ignored, and it stays so.
  sigaction(SIGHUP, nullptr, &old_hang_up_);
  if (old_hang_up_.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
}

StopRequest::~StopRequest() {
  sigaction(SIGINT, &old_interrupt_, nullptr);
  sigaction(SIGTERM, &old_terminate_, nullptr);
  sigaction(SIGHUP, &old_hang_up_, nullptr);
  g_installed = false;
}

const std::atomic<bool>& StopRequest::flag() const { return g_requested; }

int StopRequest::signal() const { return g_signal; }

}  // namespace heddle::cli
