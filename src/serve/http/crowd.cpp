#include "serve/http/crowd.h"

#include <event2/listener.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/log.h"
#include "serve/http/event_loop.h"

namespace heddle::serve {
namespace {

constexpr double kLook_s = 0.25;              ///< Between two looks at the descriptors.
constexpr std::chrono::seconds kWarning{60};  ///< Between two warnings.

/// Descriptors that this process may have; it is raised when the server starts.
int descriptor_limit() {
  constexpr rlim_t kMost = 1 << 30;
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<int>(std::min(limit.rlim_cur, kMost))
                                               : static_cast<int>(kMost);
}

/// The system gives the lowest number that is free: one beyond the most says that all below are
/// taken.
bool is_crowded(int most) {
  const int lowest = dup(STDIN_FILENO);
  if (lowest < 0) return errno == EMFILE;
  close(lowest);
  return lowest >= most;
}

/// The port of this side of a connection; -1 for what is no connection.
int connected_port(int descriptor) {
  sockaddr_storage here{}, peer{};
  socklen_t size = sizeof here, peer_size = sizeof peer;
  if (getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0 ||
      getsockname(descriptor, reinterpret_cast<sockaddr*>(&here), &size) != 0)
    return -1;
  if (here.ss_family == AF_INET) return reinterpret_cast<sockaddr_in*>(&here)->sin_port;
  if (here.ss_family == AF_INET6) return reinterpret_cast<sockaddr_in6*>(&here)->sin6_port;
  return -1;
}

int port_of(int listener) {
  sockaddr_storage here{};
  socklen_t size = sizeof here;
  getsockname(listener, reinterpret_cast<sockaddr*>(&here), &size);
  return here.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&here)->sin6_port
                                    : reinterpret_cast<sockaddr_in*>(&here)->sin_port;
}

}  // namespace

Crowd::Crowd(EventLoop& loop, evconnlistener* listener,
             std::function<std::unordered_set<int>()> answered)
    : loop_(loop), listener_(listener), answered_(std::move(answered)) {
  // Without a descriptor accept() fails. libevent would try again at once, for ever, and write a
  // line each time: the next look tries again.
  evconnlistener_set_error_cb(listener_,
                              [](evconnlistener* full, void*) { evconnlistener_disable(full); });
  look_later();
}

Crowd::~Crowd() { *is_alive_ = false; }

void Crowd::look_later() {
  loop_.post_after(kLook_s, [this, is_alive = is_alive_] {
    if (!*is_alive) return;
    look();
    evconnlistener_enable(listener_);
    look_later();
  });
}

void Crowd::look() {
  const int limit = descriptor_limit();
  if (!is_crowded(limit - limit / 8)) return;
  const std::unordered_set<int> answered = answered_();
  const int port = port_of(evconnlistener_get_fd(listener_));
  int closed = 0;
  // Descriptors by their numbers: with none free, not even the folder of them can be opened.
  for (int descriptor = 0; descriptor < limit; ++descriptor) {
    if (answered.contains(descriptor) || connected_port(descriptor) != port) continue;
    shutdown(descriptor, SHUT_RDWR);  // libevent sees the end and closes it
    ++closed;
  }
  if (closed == 0 || std::chrono::steady_clock::now() < next_warning_) return;
  next_warning_ = std::chrono::steady_clock::now() + kWarning;
  log::warning(
      "{} connections without a request were closed: of {} descriptors seven of eight were taken "
      "(ulimit -n)",
      closed, limit);
}

}  // namespace heddle::serve
