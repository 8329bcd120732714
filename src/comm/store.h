#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "comm/endpoint.h"
#include "comm/listener.h"

namespace heddle::comm {

struct StoreHandle;

using Seconds = std::chrono::duration<double>;

/// The key-value store through which the ranks of a job find each other: StoreServer, which hears
/// members of the job only, or the TCPStore that torchrun serves. Every call has a deadline; what
/// goes wrong is a CommError that names the store's endpoint. A copy shares the connection; one
/// call at a time uses it, so a thread of its own takes a reconnected().
class Store {
 public:
  /// Serves a store on the listener's socket for as long as a copy lives, to those that have the
  /// secret.
  static Store serve(Listener listener, Seconds timeout, const std::string& secret = "");
  /// Throws CommError if nothing that speaks the store's protocol and has the secret answers before
  /// the deadline.
  static Store connect(const Endpoint& endpoint, Seconds timeout, const std::string& secret = "");
  /// A TCPStore of c10d, which takes whatever anybody who reaches its port says.
  static Store connect_unguarded(const Endpoint& endpoint, Seconds timeout);
  /// This store through a connection of its own.
  Store reconnected() const;
  /// This store and connection with keys that begin with "prefix/".
  Store below(const std::string& prefix) const;

  const Endpoint& endpoint() const { return endpoint_; }

  void set(const std::string& key, std::string_view value) const;
  /// The value that stands after this call: `value`, or what somebody wrote before.
  std::string set_if_absent(const std::string& key, const std::string& value) const;
  /// Adds to a counter, which begins at 0, and returns it.
  std::int64_t add(const std::string& key, std::int64_t amount) const;
  /// Nothing if the key has not been set.
  std::optional<std::string> find(const std::string& key) const;
  /// Waits for the key, at most `timeout`; nothing if it did not come.
  std::optional<std::string> wait(const std::string& key, Seconds timeout) const;

  const StoreHandle& handle() const { return *handle_; }

 private:
  Store(std::shared_ptr<const StoreHandle> handle, Endpoint endpoint);
  std::shared_ptr<const StoreHandle> handle_;
  Endpoint endpoint_;
};

}  // namespace heddle::comm
