#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "serve/http/router.h"

namespace heddle::serve {

struct ServerOptions {
  std::size_t most_body_bytes = std::size_t{64} << 20;  ///< As sent, and once decompressed.
  std::size_t most_header_bytes = std::size_t{16} << 10;
  int connection_timeout_s = 90;  ///< Without a byte, while a request comes or none is under way.
  double drain_s = 30;            ///< At the end, for the answers under way.
  std::size_t most_stream_bytes = std::size_t{8} << 20;  ///< Unread by a client: then it is cut.
  /// Body of answers to requests that cannot be read, so that nobody knows their address; JSON.
  ErrorBody error_body = {};
};

/// HTTP/1.1 on one loop thread (libevent): requests that wait cost no thread. Handlers run on the
/// loop's thread or on one worker thread, and answers may come from any. Responders must not
/// outlive it.
class Server {
 public:
  explicit Server(const ServerOptions& options = {});
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// Before run().
  void route(Route route);
  /// Who sent a request, by its headers; called for all routes that are not public, on the loop's
  /// thread. Throws HttpError 401. Without it everybody is the caller "local" with every scope.
  void authenticate_by(std::function<Caller(const Request&)> identify);
  /// Lets a request of a known caller in or throws HttpError 429; called for the routes that cost
  /// something, on the loop's thread.
  void meter_by(std::function<Admission(const Caller&, Cost)> meter);
  /// Told of every answer (its status, the pattern of its route or "", and the seconds it took), on
  /// the loop's thread.
  void observe_by(
      std::function<void(const std::string& pattern, int status, double seconds)> observe);

  /// Binds; port 0 takes a free one. Returns the port. Throws ConfigError.
  int listen(const std::string& host, int port);
  /// Serves until `stop` is true. Then takes no new connections, calls `on_drain` once on the
  /// loop's thread, and returns when all answers are made and `is_idle` says so, or drain_s are
  /// over.
  void run(const std::atomic<bool>& stop, const std::function<void()>& on_drain = {},
           const std::function<bool()>& is_idle = {});
  /// Requests that change something may be refused from here on (see run()).
  bool is_draining() const;
  const ServerOptions& options() const;

  // From any thread:
  /// Runs the work on the loop's thread, in the order of the calls.
  void post(std::function<void()> work);
  /// Calls it after some seconds.
  void post_after(double seconds, std::function<void()> work);
  /// Runs the work on the worker thread, in the order of the calls.
  void work(std::function<void()> work);

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace heddle::serve
