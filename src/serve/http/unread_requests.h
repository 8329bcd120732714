#pragma once

#include <functional>
#include <string>

struct evhttp;

namespace heddle::serve {

/// libevent 2.1 answers requests that it does not read to their end (too large, broken, methods it
/// does not know) itself, in HTML, and tells nobody. Its answers are reworded in the buffer of
/// their connection, before the socket has them.
class UnreadRequests {
 public:
  /// The text of an answer, as JSON.
  using Body = std::function<std::string(int status)>;
  /// For all connections of `http`, which it outlives.
  UnreadRequests(evhttp* http, Body body);
  UnreadRequests(const UnreadRequests&) = delete;
  UnreadRequests& operator=(const UnreadRequests&) = delete;

  /// An answer of libevent's with another body; nothing for any other answer, or a part of one.
  static std::string reworded(const std::string& answer, const Body& body);

 private:
  Body body_;
};

}  // namespace heddle::serve
