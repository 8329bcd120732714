#include "comm/reach.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "base/errors.h"

namespace heddle::comm {
namespace {

constexpr std::chrono::milliseconds kLongestPause{200};

/// 0 once the address takes a connection, within `limit`; else why it does not, as errno.
int try_address(const addrinfo& address, std::chrono::milliseconds limit) {
  const int descriptor = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (descriptor < 0) return errno;
  int error = 0;
  if (::connect(descriptor, address.ai_addr, address.ai_addrlen) != 0) {
    error = errno;
    pollfd ready = {descriptor, POLLOUT, 0};
    socklen_t length = sizeof error;
    if (error == EINPROGRESS && ::poll(&ready, 1, static_cast<int>(limit.count())) > 0) {
      ::getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &length);
    } else if (error == EINPROGRESS) {
      error = ETIMEDOUT;
    }
  }
  ::close(descriptor);
  return error;
}

/// "" once the endpoint takes a connection, else why it does not. Throws ConfigError for a host
/// that does not exist.
std::string try_endpoint(const Endpoint& endpoint, std::chrono::milliseconds limit) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(endpoint.address().c_str(), std::to_string(endpoint.port).c_str(),
                                 &hints, &found);
  if (status != 0) {
    const std::string reason =
        fmt::format("cannot resolve '{}': {}", endpoint.address(), gai_strerror(status));
    if (status == EAI_AGAIN) return reason;  // a name server that many ranks ask at once
    throw ConfigError(reason);
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  int error = 0;
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    error = try_address(*a, limit);
    if (error == 0) return "";
  }
  return error == ECONNREFUSED ? "nothing listens there" : std::strerror(error);
}

}  // namespace

void require_resolvable(const Endpoint& endpoint, std::string_view what) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(endpoint.address().c_str(), nullptr, &hints, &found);
  if (status == EAI_AGAIN) return;
  if (status != 0) {
    throw_error<ConfigError>("{}: cannot resolve '{}': {}", what, endpoint.address(),
                             gai_strerror(status));
  }
  freeaddrinfo(found);
}

void wait_for_listener(const Endpoint& endpoint, Seconds timeout) {
  constexpr std::chrono::milliseconds kAttempt{1000};
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::chrono::milliseconds pause{10};
  for (;;) {
    const std::string reason = try_endpoint(endpoint, kAttempt);
    if (reason.empty()) return;
    if (std::chrono::steady_clock::now() >= deadline) {
      throw_error<CommError>(
          "{}, after {:.3g} s (parallel.timeout_s); does the process of rank 0 run, and does this "
          "host reach it?",
          reason, timeout.count());
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

}  // namespace heddle::comm
