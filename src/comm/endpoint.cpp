#include "comm/endpoint.h"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>

#include "base/errors.h"

namespace heddle::comm {
namespace {

template <class Address>
bool is_address(int family, const std::string& text) {
  Address parsed{};
  return inet_pton(family, text.c_str(), &parsed) == 1;
}

bool is_host_name(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '-' || c == '.' || c == '_';
  });
}

}  // namespace

std::string Endpoint::address() const { return scope.empty() ? host : host + "%" + scope; }

std::string Endpoint::to_string() const {
  return kind == Kind::kIpv6 ? fmt::format("[{}]:{}", address(), port)
                             : fmt::format("{}:{}", host, port);
}

std::uint16_t parse_port(std::string_view text, std::string_view what) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) {
    throw_error<ConfigError>("{}: '{}' is no port, expected 0 to 65535", what, text);
  }
  return port;
}

Endpoint make_endpoint(std::string_view host, std::uint16_t port, std::string_view what) {
  Endpoint endpoint;
  endpoint.port = port;
  const auto percent = host.find('%');
  endpoint.host = host.substr(0, percent);
  if (percent != std::string_view::npos) endpoint.scope = host.substr(percent + 1);
  if (is_address<in6_addr>(AF_INET6, endpoint.host)) {
    endpoint.kind = Endpoint::Kind::kIpv6;
  } else if (endpoint.scope.empty() && is_address<in_addr>(AF_INET, endpoint.host)) {
    endpoint.kind = Endpoint::Kind::kIpv4;
  } else if (percent != std::string_view::npos || !is_host_name(endpoint.host)) {
    throw_error<ConfigError>(
        "{}: '{}' is neither a host name nor an IPv4 or IPv6 address (fe80::1%eth0)", what, host);
  }
  return endpoint;
}

Endpoint parse_endpoint(std::string_view text, std::string_view what) {
  std::string_view host, port;
  if (text.starts_with('[')) {
    const auto bracket = text.find("]:");
    if (bracket != std::string_view::npos) {
      host = text.substr(1, bracket - 1);
      port = text.substr(bracket + 2);
    }
  } else if (std::count(text.begin(), text.end(), ':') == 1) {
    host = text.substr(0, text.find(':'));
    port = text.substr(text.find(':') + 1);
  }
  if (host.empty() || port.empty()) {
    throw_error<ConfigError>("{}: '{}' is no endpoint, expected HOST:PORT or [IPV6]:PORT", what,
                             text);
  }
  const Endpoint endpoint = make_endpoint(host, parse_port(port, what), what);
  if (text.starts_with('[') != (endpoint.kind == Endpoint::Kind::kIpv6)) {
    throw_error<ConfigError>("{}: '{}': brackets belong to IPv6 addresses", what, text);
  }
  return endpoint;
}

}  // namespace heddle::comm
