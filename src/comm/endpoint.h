#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace heddle::comm {

/// Where a socket listens. Written and read in one place, so that an IPv6 address never meets a
/// port without its brackets.
struct Endpoint {
  enum class Kind { kName, kIpv4, kIpv6 };
  Kind kind = Kind::kName;
  std::string host;   ///< Without brackets and scope.
  std::string scope;  ///< Interface of a link-local IPv6 address ("eth0"), otherwise empty.
  std::uint16_t port = 0;

  /// Address as a resolver takes it: "node7", "10.0.0.1", "fe80::1%eth0".
  std::string address() const;
  /// "node7:29500", "10.0.0.1:29500", "[fe80::1%eth0]:29500".
  std::string to_string() const;
  bool operator==(const Endpoint&) const = default;
};

/// From "HOST:PORT" or "[IPV6%SCOPE]:PORT". Throws ConfigError that begins with `what` and says
/// what is wrong.
Endpoint parse_endpoint(std::string_view text, std::string_view what);

/// From a host without port and a port. Throws ConfigError as parse_endpoint.
Endpoint make_endpoint(std::string_view host, std::uint16_t port, std::string_view what);

/// 1 to 65535, or 0 for a port that the system chooses. Throws ConfigError as parse_endpoint.
std::uint16_t parse_port(std::string_view text, std::string_view what);

}  // namespace heddle::comm
