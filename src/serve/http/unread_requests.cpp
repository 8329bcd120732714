#include "serve/http/unread_requests.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/http.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace heddle::serve {
namespace {

constexpr std::size_t kLongest = 1024;  ///< Bytes of an answer of libevent's own.
constexpr std::string_view kBegin = "HTTP/1.", kBody = "\r\n\r\n<HTML><HEAD>\n<TITLE>",
                           kEnd = "</HTML>\n";
constexpr std::size_t kStatus = 9;  ///< Place of the status: "HTTP/1.1 413".

void replace_line(std::string& head, std::string_view name, const std::string& line) {
  const std::size_t first = head.find(name);
  if (first == std::string::npos) {
    head += "\r\n" + line;
  } else {
    head.replace(first, std::min(head.find("\r\n", first), head.size()) - first, line);
  }
}

/// The bufferevent alone takes from the front of its output, and lets nobody look there once it has
/// written.
class OpenFront {
 public:
  explicit OpenFront(evbuffer* buffer) : buffer_(buffer) { evbuffer_unfreeze(buffer_, 1); }
  ~OpenFront() { evbuffer_freeze(buffer_, 1); }
  OpenFront(const OpenFront&) = delete;
  OpenFront& operator=(const OpenFront&) = delete;

 private:
  evbuffer* buffer_;
};

void look_at(evbuffer* out, const evbuffer_cb_info* change, void* body) {
  const std::size_t length = evbuffer_get_length(out);
  if (change->n_added == 0 || length > kLongest) return;
  const OpenFront open(out);
  char status[kStatus + 1];
  // Answers that are no refusals are not copied.
  if (evbuffer_copyout(out, status, sizeof status) != sizeof status || status[kStatus] < '4')
    return;
  std::string answer(length, '\0');
  evbuffer_copyout(out, answer.data(), length);
  const std::string other =
      UnreadRequests::reworded(answer, *static_cast<const UnreadRequests::Body*>(body));
  if (other.empty()) return;
  evbuffer_drain(out, length);
  evbuffer_add(out, other.data(), other.size());
}

}  // namespace

std::string UnreadRequests::reworded(const std::string& answer, const Body& body) {
  const std::size_t place = answer.find(kBody);
  if (!answer.starts_with(kBegin) || place == std::string::npos || !answer.ends_with(kEnd))
    return "";
  const std::string text = body(std::atoi(answer.c_str() + kStatus));
  std::string head = answer.substr(0, place);
  replace_line(head, "Content-Type:", "Content-Type: application/json");
  replace_line(head, "Content-Length:", "Content-Length: " + std::to_string(text.size()));
  return head + "\r\n\r\n" + text;
}

UnreadRequests::UnreadRequests(evhttp* http, Body body) : body_(std::move(body)) {
  evhttp_set_bevcb(
      http,
      [](event_base* base, void* text) {
        bufferevent* connection = bufferevent_socket_new(base, -1, 0);
        if (connection != nullptr)
          evbuffer_add_cb(bufferevent_get_output(connection), look_at, text);
        return connection;
      },
      &body_);
}

}  // namespace heddle::serve
