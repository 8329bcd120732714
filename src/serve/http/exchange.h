#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "serve/http/event_loop.h"
#include "serve/http/responder.h"

struct evbuffer;
struct evhttp_connection;
struct evhttp_request;

namespace heddle::serve {

/// One request of a client between its arrival and the last byte of its answer. All but is_gone()
/// runs on the loop's thread.
class OpenRequest : public std::enable_shared_from_this<OpenRequest> {
 public:
  /// `ended` is called once, when the answer is sent or the client has gone; `status` is 0 if
  /// nothing was answered.
  OpenRequest(EventLoop& loop, evhttp_request* request, std::string id, std::size_t most_unread,
              std::function<void(OpenRequest&, int status)> ended);
  ~OpenRequest();

  void answer(int status, const std::string& body, const std::string& content_type,
              const Headers& headers);
  void answer_file(const std::filesystem::path& file);
  void start(int status, const std::string& content_type, const Headers& headers);
  /// Headers of the answer besides those that come with it.
  void add_headers(Headers headers) { more_headers_.merge(headers); }
  void write(const std::string& piece);
  void end();
  void on_gone(std::function<void()> action);
  bool is_gone() const { return is_gone_; }
  bool is_answered() const { return phase_ != Phase::kOpen; }
  /// Closes the connection, as if the client had.
  void cut();

  EventLoop& loop() const { return loop_; }
  /// The connection's.
  int descriptor() const;
  const std::string& id() const { return id_; }
  std::chrono::steady_clock::time_point since() const { return since_; }

 private:
  enum class Phase { kOpen, kStreaming, kSending, kDone };
  void send(int status, const std::string& content_type, const Headers& headers, evbuffer* bytes);
  void put_headers(const std::string& content_type, const Headers& headers);
  void watch();
  void closed();  ///< The connection is being freed.
  void finish();

  EventLoop& loop_;
  evhttp_request* request_;
  evhttp_connection* connection_;
  std::string id_;
  std::size_t most_unread_;
  std::function<void(OpenRequest&, int)> ended_;
  std::function<void()> gone_action_;
  Headers more_headers_;
  event* hang_up_ = nullptr;  ///< libevent does not read, and so not notice, while we answer.
  std::atomic<bool> is_gone_ = false;
  Phase phase_ = Phase::kOpen;
  int status_ = 0;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

/// A responder of the request, for any thread.
Responder responder_of(const std::shared_ptr<OpenRequest>& request,
                       std::function<std::string()> unanswered_body);

}  // namespace heddle::serve
