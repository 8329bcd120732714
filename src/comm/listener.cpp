#include "comm/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "base/errors.h"

namespace heddle::comm {
namespace {

constexpr int kBacklog = 2048;  // every rank of a large job connects at once

struct Bound {
  int descriptor = -1;
  std::uint16_t port = 0;
  int error = 0;
};

Bound bind_to(const addrinfo& address) {
  Bound bound;
  bound.descriptor = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bound.descriptor < 0) return {-1, 0, errno};
  const int on = 1, off = 0;
  // A port in TIME_WAIT of a run that has just ended is free; one that is listened on is not.
  setsockopt(bound.descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.ai_family == AF_INET6)
    setsockopt(bound.descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  sockaddr_storage taken{};
  socklen_t length = sizeof taken;
  if (::bind(bound.descriptor, address.ai_addr, address.ai_addrlen) != 0 ||
      ::listen(bound.descriptor, kBacklog) != 0 ||
      ::getsockname(bound.descriptor, reinterpret_cast<sockaddr*>(&taken), &length) != 0) {
    bound.error = errno;
    ::close(bound.descriptor);
    bound.descriptor = -1;
    return bound;
  }
  bound.port =
      ntohs(taken.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(taken).sin6_port
                                        : reinterpret_cast<const sockaddr_in&>(taken).sin_port);
  return bound;
}

}  // namespace

Listener::Listener(const Endpoint& endpoint) : endpoint_(endpoint) {
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string host = endpoint.address();
  const int status = getaddrinfo(host.empty() ? nullptr : host.c_str(),
                                 std::to_string(endpoint.port).c_str(), &hints, &found);
  if (status != 0) {
    throw_error<CommError>("cannot listen on {}: {}", endpoint.to_string(), gai_strerror(status));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  int error = 0;
  // IPv6 first: its wildcard takes IPv4 as well.
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* a = addresses.get(); a != nullptr && descriptor_ < 0; a = a->ai_next) {
      if (a->ai_family != family) continue;
      const Bound bound = bind_to(*a);
      descriptor_ = bound.descriptor;
      if (descriptor_ >= 0) endpoint_.port = bound.port;
      // That the port is taken says more than that this machine has no IPv6.
      if (bound.error != 0 && error != EADDRINUSE) error = bound.error;
    }
    if (error == EADDRINUSE) break;
  }
  if (descriptor_ < 0) {
    throw_error<CommError>("cannot listen on {}: {}{}", endpoint.to_string(), std::strerror(error),
                           error == EADDRINUSE ? " (another job or program holds the port)" : "");
  }
}

Listener::~Listener() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Listener::Listener(Listener&& other) noexcept
    : endpoint_(std::move(other.endpoint_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

Endpoint Listener::local_endpoint() const {
  if (!endpoint_.host.empty()) return endpoint_;
  return make_endpoint("127.0.0.1", endpoint_.port, "loopback");
}

int Listener::release() { return std::exchange(descriptor_, -1); }

}  // namespace heddle::comm
