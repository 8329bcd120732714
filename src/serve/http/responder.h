#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>

namespace heddle::serve {

using Headers = std::map<std::string, std::string>;

/// The answer to one request, made at any time from any thread: either answer() once, or start(),
/// write() as often as wanted, and end(). Copies share the request. What comes after the end or
/// after the client has gone does nothing. If all copies go without an answer the client gets 500.
class Responder {
 public:
  /// Services of the server for its responders; calls come from any thread.
  class Exchange {
   public:
    virtual ~Exchange() = default;
    virtual void answer(int status, std::string body, const std::string& content_type,
                        Headers headers) = 0;
    virtual void answer_file(std::filesystem::path file) = 0;
    virtual void start(int status, const std::string& content_type, Headers headers) = 0;
    virtual void write(std::string piece) = 0;
    virtual void end() = 0;
    virtual bool is_gone() const = 0;
    virtual void on_gone(std::function<void()> action) = 0;
  };
  explicit Responder(std::shared_ptr<Exchange> exchange) : exchange_(std::move(exchange)) {}

  void answer(int status, std::string body, const std::string& content_type = "application/json",
              Headers headers = {}) const {
    exchange_->answer(status, std::move(body), content_type, std::move(headers));
  }
  /// 200 with the bytes of a file, which is read as the client takes them; 404 if it cannot be
  /// opened.
  void answer_file(std::filesystem::path file) const { exchange_->answer_file(std::move(file)); }
  /// Begins an answer in pieces, for example of text/event-stream.
  void start(int status, const std::string& content_type, Headers headers = {}) const {
    exchange_->start(status, content_type, std::move(headers));
  }
  void write(std::string piece) const { exchange_->write(std::move(piece)); }
  void end() const { exchange_->end(); }

  /// The client has closed the connection before the end of the answer.
  bool is_gone() const { return exchange_->is_gone(); }
  /// Called once, on the loop's thread, if the client closes the connection before the end of the
  /// answer; at once if it has already. Replaces an earlier action.
  void on_gone(std::function<void()> action) const { exchange_->on_gone(std::move(action)); }

 private:
  std::shared_ptr<Exchange> exchange_;
};

}  // namespace heddle::serve
