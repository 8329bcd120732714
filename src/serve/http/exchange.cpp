#include "serve/http/exchange.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/http.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"

namespace heddle::serve {
namespace {

const char* reason_of(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 303:
      return "See Other";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 409:
      return "Conflict";
    case 410:
      return "Gone";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 422:
      return "Unprocessable Content";
    case 429:
      return "Too Many Requests";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    default:
      return status < 400 ? "OK" : status < 500 ? "Bad Request" : "Internal Server Error";
  }
}

/// Sends what the threads of the server say of a request to the loop.
class PostedExchange final : public Responder::Exchange {
 public:
  PostedExchange(std::shared_ptr<OpenRequest> request, std::function<std::string()> unanswered)
      : request_(std::move(request)), unanswered_(std::move(unanswered)) {}
  ~PostedExchange() override {
    post([unanswered = std::move(unanswered_)](OpenRequest& request) {
      if (request.is_answered()) return;
      log::error("request {} got no answer from its handler", request.id());
      request.answer(500, unanswered(), "application/json", {});
    });
  }

  void answer(int status, std::string body, const std::string& content_type,
              Headers headers) override {
    post([status, body = std::move(body), content_type, headers = std::move(headers)](
             OpenRequest& request) { request.answer(status, body, content_type, headers); });
  }
  void answer_file(std::filesystem::path file) override {
    post([file = std::move(file)](OpenRequest& request) { request.answer_file(file); });
  }
  void start(int status, const std::string& content_type, Headers headers) override {
    post([status, content_type, headers = std::move(headers)](OpenRequest& request) {
      request.start(status, content_type, headers);
    });
  }
  void write(std::string piece) override {
    post([piece = std::move(piece)](OpenRequest& request) { request.write(piece); });
  }
  void end() override {
    post([](OpenRequest& request) { request.end(); });
  }
  bool is_gone() const override { return request_->is_gone(); }
  void on_gone(std::function<void()> action) override {
    post([action = std::move(action)](OpenRequest& request) { request.on_gone(action); });
  }

 private:
  template <class Work>
  void post(Work work) {
    request_->loop().post([request = request_, work = std::move(work)] { work(*request); });
  }

  std::shared_ptr<OpenRequest> request_;
  std::function<std::string()> unanswered_;
};

}  // namespace

OpenRequest::OpenRequest(EventLoop& loop, evhttp_request* request, std::string id,
                         std::size_t most_unread, std::function<void(OpenRequest&, int)> ended)
    : loop_(loop),
      request_(request),
      connection_(evhttp_request_get_connection(request)),
      id_(std::move(id)),
      most_unread_(most_unread),
      ended_(std::move(ended)) {
  watch();
}

OpenRequest::~OpenRequest() {
  if (hang_up_ != nullptr) event_free(hang_up_);
}

int OpenRequest::descriptor() const {
  return bufferevent_getfd(evhttp_connection_get_bufferevent(connection_));
}

void OpenRequest::watch() {
  evhttp_connection_set_closecb(
      connection_,
      [](evhttp_connection*, void* self) { static_cast<OpenRequest*>(self)->closed(); }, this);
  evhttp_request_set_on_complete_cb(
      request_, [](evhttp_request*, void* self) { static_cast<OpenRequest*>(self)->finish(); },
      this);
  hang_up_ = event_new(
      loop_.base(), descriptor(), EV_CLOSED,
      [](evutil_socket_t, short, void* self) { static_cast<OpenRequest*>(self)->cut(); }, this);
  event_add(hang_up_, nullptr);
}

void OpenRequest::put_headers(const std::string& content_type, const Headers& headers) {
  evkeyvalq* out = evhttp_request_get_output_headers(request_);
  if (!content_type.empty()) evhttp_add_header(out, "Content-Type", content_type.c_str());
  evhttp_add_header(out, "x-request-id", id_.c_str());
  for (const Headers* each : {&headers, static_cast<const Headers*>(&more_headers_)})
    for (const auto& [name, value] : *each) evhttp_add_header(out, name.c_str(), value.c_str());
}

void OpenRequest::answer(int status, const std::string& body, const std::string& content_type,
                         const Headers& headers) {
  if (phase_ != Phase::kOpen) return;
  evbuffer* bytes = evbuffer_new();
  evbuffer_add(bytes, body.data(), body.size());
  send(status, status == 204 ? "" : content_type, headers, bytes);
}

void OpenRequest::answer_file(const std::filesystem::path& file) {
  if (phase_ != Phase::kOpen) return;
  const int descriptor = open(file.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
  struct stat found {};
  if (descriptor < 0 || fstat(descriptor, &found) != 0 || !S_ISREG(found.st_mode)) {
    if (descriptor >= 0) close(descriptor);
    return answer(404, "this file is gone\n", "text/plain", {});
  }
  evbuffer* bytes = evbuffer_new();
  // The buffer closes the descriptor.
  if (found.st_size == 0 || evbuffer_add_file(bytes, descriptor, 0, found.st_size) != 0)
    close(descriptor);
  send(200, "application/octet-stream", {}, bytes);
}

void OpenRequest::send(int status, const std::string& content_type, const Headers& headers,
                       evbuffer* bytes) {
  phase_ = Phase::kSending;
  status_ = status;
  put_headers(content_type, headers);
  if (evhttp_request_get_command(request_) == EVHTTP_REQ_HEAD) {
    const std::string length = std::to_string(evbuffer_get_length(bytes));
    evhttp_add_header(evhttp_request_get_output_headers(request_), "Content-Length",
                      length.c_str());
    evbuffer_drain(bytes, evbuffer_get_length(bytes));
  }
  evhttp_send_reply(request_, status, reason_of(status), bytes);
  evbuffer_free(bytes);
}

void OpenRequest::start(int status, const std::string& content_type, const Headers& headers) {
  if (phase_ != Phase::kOpen) return;
  phase_ = Phase::kStreaming;
  status_ = status;
  put_headers(content_type, headers);
  evhttp_send_reply_start(request_, status, reason_of(status));
}

void OpenRequest::write(const std::string& piece) {
  if (phase_ != Phase::kStreaming || piece.empty()) return;
  evbuffer* bytes = evbuffer_new();
  evbuffer_add(bytes, piece.data(), piece.size());
  evhttp_send_reply_chunk(request_, bytes);
  evbuffer_free(bytes);
  const evbuffer* unread = bufferevent_get_output(evhttp_connection_get_bufferevent(connection_));
  if (evbuffer_get_length(unread) > most_unread_) {
    log::warning("request {}: the client leaves {} bytes of its stream unread; it is cut", id_,
                 evbuffer_get_length(unread));
    cut();
  }
}

void OpenRequest::end() {
  if (phase_ != Phase::kStreaming) return;
  phase_ = Phase::kSending;
  evhttp_send_reply_end(request_);
}

void OpenRequest::on_gone(std::function<void()> action) {
  if (is_gone_) {
    action();
  } else if (phase_ != Phase::kDone) {
    gone_action_ = std::move(action);
  }
}

void OpenRequest::cut() {
  if (phase_ == Phase::kDone) return;
  const auto self = shared_from_this();
  evhttp_connection_free(connection_);  // calls closed()
}

void OpenRequest::closed() {
  if (phase_ == Phase::kDone) return;
  const auto self = shared_from_this();
  // libevent takes a request that is being answered from a connection that fails, and leaves it.
  if (phase_ != Phase::kSending && evhttp_request_get_connection(request_) == nullptr)
    evhttp_request_free(request_);
  is_gone_ = phase_ != Phase::kSending;
  if (is_gone_ && gone_action_) gone_action_();
  finish();
}

void OpenRequest::finish() {
  const auto self = shared_from_this();
  phase_ = Phase::kDone;
  request_ = nullptr;
  gone_action_ = nullptr;
  event_del(hang_up_);
  evhttp_connection_set_closecb(connection_, nullptr, nullptr);
  ended_(*this, status_);
}

Responder responder_of(const std::shared_ptr<OpenRequest>& request,
                       std::function<std::string()> unanswered_body) {
  return Responder(std::make_shared<PostedExchange>(request, std::move(unanswered_body)));
}

}  // namespace heddle::serve
