#include "serve/http/server.h"

#include <arpa/inet.h>
#include <event2/buffer.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/keyvalq_struct.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/log.h"
#include "base/quote.h"
#include "base/text.h"
#include "serve/http/body.h"
#include "serve/http/crowd.h"
#include "serve/http/event_loop.h"
#include "serve/http/exchange.h"
#include "serve/http/unread_requests.h"
#include "serve/http/work_queue.h"

namespace heddle::serve {
namespace {

/// A body of up to so many times the limit is read to its end, as its route may have to know whose
/// it was before it is refused.
constexpr std::size_t kReadBodies = 2;
constexpr std::size_t kLongestRequestId = 128;
constexpr double kTick_s = 0.05;  ///< How soon a request to stop is seen.

std::string random_id() {
  std::uint64_t bits = 0;
  if (getrandom(&bits, sizeof bits, 0) != sizeof bits) throw FileError("getrandom() fails");
  return fmt::format("{:016x}", bits);
}

bool is_plain_id(std::string_view text) {
  return !text.empty() && text.size() <= kLongestRequestId && std::ranges::all_of(text, [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) ||
           std::string_view("-_.:").find(c) != std::string_view::npos;
  });
}

const char* method_of(const evhttp_request* request) {
  switch (evhttp_request_get_command(request)) {
    case EVHTTP_REQ_GET:
      return "GET";
    case EVHTTP_REQ_POST:
      return "POST";
    case EVHTTP_REQ_PUT:
      return "PUT";
    case EVHTTP_REQ_DELETE:
      return "DELETE";
    case EVHTTP_REQ_HEAD:
      return "HEAD";
    case EVHTTP_REQ_OPTIONS:
      return "OPTIONS";
    case EVHTTP_REQ_PATCH:
      return "PATCH";
    default:
      return "";
  }
}

void read_query(const char* text, std::map<std::string, std::string>& query) {
  for (const std::string& pair : text::split(text == nullptr ? "" : text, '&')) {
    const std::size_t equals = std::min(pair.find('='), pair.size());
    const auto name = percent_decoded(pair.substr(0, equals), true);
    const auto value = percent_decoded(pair.substr(std::min(equals + 1, pair.size())), true);
    if (!name || !value) throw HttpError(400, "the query of the address has a broken % escape");
    if (!name->empty()) query[*name] = *value;
  }
}

std::string taken_body(evhttp_request* request) {
  evbuffer* buffer = evhttp_request_get_input_buffer(request);
  std::string body(evbuffer_get_length(buffer), '\0');
  evbuffer_remove(buffer, body.data(), body.size());
  return body;
}

/// Each parked poll is a connection: the soft limit of 1024 is for programs with select().
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

std::string plain_error(int, const std::string& message) { return message + "\n"; }

/// Throws HttpError unless it is known where the body ends: what libevent takes for the end of this
/// request may be another request, that a proxy let through as a part of the body.
void check_framing(const evkeyvalq* headers) {
  std::string coding;
  std::set<std::string> lengths;
  for (const evkeyval* header = headers->tqh_first; header != nullptr;
       header = header->next.tqe_next) {
    const std::string name = lower(header->key);
    if (name == "transfer-encoding") coding += (coding.empty() ? "" : ", ") + lower(header->value);
    if (name == "content-length") lengths.insert(header->value);
  }
  if (!coding.empty() && coding != "chunked")
    throw HttpError(501,
                    fmt::format("Transfer-Encoding {}: expected chunked (a compressed body has "
                                "Content-Encoding)",
                                text::shown(coding, 60)),
                    0, {{"Connection", "close"}});
  if (lengths.size() > 1)
    throw HttpError(400, "the request has several lengths: expected one Content-Length", 0,
                    {{"Connection", "close"}});
}

}  // namespace

class Server::Loop {
 public:
  explicit Loop(const ServerOptions& options) : options_(options) {
    raise_descriptor_limit();
    http_ = evhttp_new(loop_.base());
    evhttp_set_max_body_size(http_, static_cast<ev_ssize_t>(kReadBodies * options.most_body_bytes));
    // A client that is cut off while it sends sees no answer, and sends again.
    evhttp_set_flags(http_, EVHTTP_SERVER_LINGERING_CLOSE);
    evhttp_set_max_headers_size(http_, static_cast<ev_ssize_t>(options.most_header_bytes));
    evhttp_set_timeout(http_, options.connection_timeout_s);
    // Others than those of routes get an answer that says which a path has.
    evhttp_set_allowed_methods(http_, EVHTTP_REQ_GET | EVHTTP_REQ_POST | EVHTTP_REQ_PUT |
                                          EVHTTP_REQ_DELETE | EVHTTP_REQ_HEAD | EVHTTP_REQ_OPTIONS |
                                          EVHTTP_REQ_PATCH);
    unread_ = std::make_unique<UnreadRequests>(http_, [this](int status) {
      if (observe_) observe_("", status, 0);
      return refusal(status);
    });
    evhttp_set_gencb(
        http_, [](evhttp_request* request, void* self) { static_cast<Loop*>(self)->take(request); },
        this);
  }
  ~Loop() {
    worker_.reset();
    crowd_.reset();
    cut_all();
    evhttp_free(http_);
  }

  int listen(const std::string& host, int port) {
    socket_ = evhttp_bind_socket_with_handle(http_, host.c_str(), static_cast<std::uint16_t>(port));
    if (socket_ == nullptr)
      throw_error<ConfigError>("cannot listen on {} port {}: {}; --port takes another", host, port,
                               std::strerror(errno));
    // Connections inherit it. Without it the last piece of an answer that takes several writes, and
    // each piece of a stream, waits until the client acknowledges the one before: for 40 ms.
    const int on = 1;
    setsockopt(evhttp_bound_socket_get_fd(socket_), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    crowd_ = std::make_unique<Crowd>(loop_, evhttp_bound_socket_get_listener(socket_), [this] {
      std::unordered_set<int> answered;
      for (const auto& [address, request] : open_) answered.insert(request->descriptor());
      return answered;
    });
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    getsockname(evhttp_bound_socket_get_fd(socket_), reinterpret_cast<sockaddr*>(&address), &size);
    return ntohs(address.ss_family == AF_INET6
                     ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                     : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  }

  void run(const std::atomic<bool>& stop, const std::function<void()>& on_drain,
           const std::function<bool()>& is_idle) {
    loop_.post([&, this] { tick(stop, on_drain, is_idle); });
    loop_.run();
    cut_all();  // who observes and whoever waits for it may go before the server
  }

  const ServerOptions options_;
  Router router_;
  std::function<Caller(const Request&)> identify_;
  std::function<Admission(const Caller&, Cost)> meter_;
  std::function<void(const std::string&, int, double)> observe_;
  std::atomic<bool> is_draining_ = false;
  EventLoop loop_;

  void add_work(std::function<void()> work) { worker_->add(std::move(work)); }

 private:
  using Time = std::chrono::steady_clock::time_point;

  void tick(const std::atomic<bool>& stop, const std::function<void()>& on_drain,
            const std::function<bool()>& is_idle) {
    if (stop && !is_draining_) {
      is_draining_ = true;
      drain_until_ = std::chrono::steady_clock::now() +
                     std::chrono::milliseconds(static_cast<std::int64_t>(options_.drain_s * 1000));
      crowd_.reset();
      evhttp_del_accept_socket(http_, socket_);
      if (on_drain) on_drain();
    }
    const bool is_late = is_draining_ && std::chrono::steady_clock::now() > drain_until_;
    const bool is_done = open_.empty() && (!is_idle || is_idle());
    if (is_draining_ && (is_done || is_late)) {
      if (is_late)
        log::warning("after {} s the server ends with {} requests left without an answer",
                     options_.drain_s, open_.size());
      loop_.stop();
      return;
    }
    loop_.post_after(kTick_s, [&, this] { tick(stop, on_drain, is_idle); });
  }

  void cut_all() {
    const auto cut = open_;
    for (const auto& [address, request] : cut) request->cut();
  }

  void take(evhttp_request* raw) {
    auto request = std::make_shared<Request>();
    evkeyvalq* headers = evhttp_request_get_input_headers(raw);
    for (const evkeyval* header = headers->tqh_first; header != nullptr;
         header = header->next.tqe_next)
      request->headers[lower(header->key)] = header->value;
    const std::string_view given = request->header("x-request-id");
    request->id = is_plain_id(given) ? std::string(given) : random_id();
    request->method = method_of(raw);
    const evhttp_uri* uri = evhttp_request_get_evhttp_uri(raw);
    const char* raw_path = evhttp_uri_get_path(uri);
    const std::string path = raw_path == nullptr ? "/" : raw_path;
    // The answer to HEAD is that to GET without its body.
    auto match = router_.find(request->method == "HEAD" ? "GET" : request->method, path);
    const std::string pattern = match.route == nullptr ? "" : match.route->pattern;
    auto open =
        std::make_shared<OpenRequest>(loop_, raw, request->id, options_.most_stream_bytes,
                                      [this, pattern](OpenRequest& ended, int status) {
                                        const std::chrono::duration<double> took =
                                            std::chrono::steady_clock::now() - ended.since();
                                        if (observe_) observe_(pattern, status, took.count());
                                        open_.erase(&ended);
                                      });
    open_[open.get()] = open;
    // The client's next request needs a connection, and finds that there is no server.
    if (is_draining_) open->add_headers({{"Connection", "close"}});
    const ErrorBody error_body = match.error_body ? match.error_body : plain_error;
    const Responder responder =
        responder_of(open, [error_body] { return error_body(500, "internal error"); });
    guarded(*request, responder, error_body, [&] {
      check_framing(headers);
      if (match.route == nullptr) {
        if (match.has_path)
          throw HttpError(405,
                          fmt::format("{} is not a method of {}: expected {}", request->method,
                                      text::shown(path), match.methods),
                          0, {{"Allow", match.methods}});
        throw_http(404, "no such address: {} {}", request->method, text::shown(path));
      }
      request->path = percent_decoded(path, false).value_or("");
      request->parameters = std::move(match.parameters);
      read_query(evhttp_uri_get_query(uri), request->query);
      if (!match.route->is_public) admit(*request, match.route->scope);
      if (is_draining_ && match.route->cost != Cost::kNone)
        throw HttpError(503, "the server ends", 5);
      if (meter_ && match.route->cost != Cost::kNone) {
        Admission admission = meter_(request->caller, match.route->cost);
        request->meter = std::move(admission.meter);
        open->add_headers(std::move(admission.headers));
      }
      request->body = taken_body(raw);
      if (match.route->on_worker) {
        worker_->add([this, request, responder, error_body, route = match.route] {
          handle(*request, responder, error_body, *route);
        });
      } else {
        handle(*request, responder, error_body, *match.route);
      }
    });
  }

  /// Answer to a request that libevent does not read.
  std::string refusal(int status) const {
    const ErrorBody error_body = options_.error_body ? options_.error_body : plain_error;
    switch (status) {
      case 413:
        return error_body(status,
                          fmt::format("the body has more than {} bytes, or chunks without a size",
                                      kReadBodies * options_.most_body_bytes));
      case 417:
        return error_body(status, "the Expect header is not known: expected 100-continue");
      case 501:
        return error_body(status,
                          "the method is not known: expected GET, POST, PUT, DELETE, HEAD, OPTIONS "
                          "or PATCH");
      default:
        return error_body(status,
                          fmt::format("the request is not HTTP/1.1 that can be read: its first "
                                      "line, a header, its length, or headers of more than {} "
                                      "bytes",
                                      options_.most_header_bytes));
    }
  }

  void handle(Request& request, const Responder& responder, const ErrorBody& error_body,
              const Route& route) {
    guarded(request, responder, error_body, [&] {
      try {
        decode_body(request.body, request.header("content-encoding"), options_.most_body_bytes);
      } catch (const HttpError& error) {
        if (!route.refusal) throw;
        return route.refusal(std::move(request), responder, error);
      }
      route.handler(std::move(request), responder);
    });
  }

  void admit(Request& request, const std::string& scope) const {
    request.caller =
        identify_ ? identify_(request) : Caller{"local", "", {"train", "sample", "admin", "read"}};
    if (!scope.empty() && !request.caller.may(scope))
      throw_http(403, "the key lacks the scope '{}'", scope);
  }

  /// Turns what the work throws into an answer.
  template <class Work>
  void guarded(const Request& request, const Responder& responder, const ErrorBody& error_body,
               const Work& work) {
    const std::string id = request.id;  // the handler takes the request
    const auto fail = [&](int status, const std::string& message, const Headers& headers = {}) {
      responder.answer(status, error_body(status, message), "application/json", headers);
    };
    try {
      work();
    } catch (const HttpError& error) {
      fail(error.status(), error.what(), error.headers());
    } catch (const UserError& error) {
      fail(400, error.what());
    } catch (const FileError& error) {
      log::error("request {}: {}", id, error.what());
      fail(500, kFilesFail);
    } catch (const std::exception& error) {
      log::error("request {}: {}", id, error.what());
      fail(500, "internal error; the server's log names request " + id);
    }
  }

  evhttp* http_;
  evhttp_bound_socket* socket_ = nullptr;
  std::unique_ptr<UnreadRequests> unread_;
  std::unique_ptr<Crowd> crowd_;
  std::unordered_map<const OpenRequest*, std::shared_ptr<OpenRequest>> open_;
  Time drain_until_;
  std::unique_ptr<WorkQueue> worker_ = std::make_unique<WorkQueue>();
};

Server::Server(const ServerOptions& options) : loop_(std::make_unique<Loop>(options)) {
  // libevent writes to a client that has left without saying that no signal is wanted.
  signal(SIGPIPE, SIG_IGN);
}
Server::~Server() = default;

void Server::route(Route route) { loop_->router_.add(std::move(route)); }
void Server::authenticate_by(std::function<Caller(const Request&)> identify) {
  loop_->identify_ = std::move(identify);
}
void Server::meter_by(std::function<Admission(const Caller&, Cost)> meter) {
  loop_->meter_ = std::move(meter);
}
void Server::observe_by(std::function<void(const std::string&, int, double)> observe) {
  loop_->observe_ = std::move(observe);
}
int Server::listen(const std::string& host, int port) { return loop_->listen(host, port); }
void Server::run(const std::atomic<bool>& stop, const std::function<void()>& on_drain,
                 const std::function<bool()>& is_idle) {
  loop_->run(stop, on_drain, is_idle);
}
bool Server::is_draining() const { return loop_->is_draining_; }
const ServerOptions& Server::options() const { return loop_->options_; }
void Server::post(std::function<void()> work) { loop_->loop_.post(std::move(work)); }
void Server::post_after(double seconds, std::function<void()> work) {
  loop_->loop_.post_after(seconds, std::move(work));
}
void Server::work(std::function<void()> work) { loop_->add_work(std::move(work)); }

}  // namespace heddle::serve
