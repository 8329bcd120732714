#pragma once

#include <cstdint>
#include <string>

#include "comm/endpoint.h"

namespace heddle::comm {

/// A listening socket. It is bound once, here, and handed over as a descriptor: between the choice
/// of a port and its use nobody else can take it.
class Listener {
 public:
  /// Listens on `endpoint`; port 0 lets the system choose. An empty host means every address of
  /// this machine, IPv4 and IPv6. Throws CommError that names the endpoint and the system's reason.
  explicit Listener(const Endpoint& endpoint);
  explicit Listener(std::uint16_t port) : Listener(Endpoint{{}, {}, {}, port}) {}
  ~Listener();
  Listener(Listener&& other) noexcept;
  Listener& operator=(Listener&&) = delete;
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  std::uint16_t port() const { return endpoint_.port; }
  /// Where a process of this machine reaches it.
  Endpoint local_endpoint() const;
  /// Gives the descriptor away; the new owner closes it.
  int release();

 private:
  Endpoint endpoint_;
  int descriptor_ = -1;
};

}  // namespace heddle::comm
