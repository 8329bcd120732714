#pragma once

#include <arpa/inet.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace heddle::serve::testing {

/// A socket that says exactly what a test wants said.
class Client {
 public:
  explicit Client(int port) : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
      throw std::runtime_error("the test's client cannot connect");
    const timeval wait{60, 0};
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
  }
  ~Client() { close(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void close() {
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
  }
  /// False where the server hangs up before it has all of them.
  bool send(const std::string& bytes) const {
    std::size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t count = ::send(socket_, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
      if (count <= 0) return false;
      done += static_cast<std::size_t>(count);
    }
    return true;
  }
  /// Bytes up to and including `mark`, or all until the server closes.
  std::string read_until(const std::string& mark) {
    while (unread_.find(mark) == std::string::npos) {
      if (!receive()) return std::exchange(unread_, "");
    }
    const std::size_t end = unread_.find(mark) + mark.size();
    std::string text = unread_.substr(0, end);
    unread_.erase(0, end);
    return text;
  }
  /// Head and body of one answer with a Content-Length.
  std::string answer() {
    std::string text = read_until("\r\n\r\n");
    const std::size_t place = text.find("Content-Length: ");
    std::size_t left = place == std::string::npos ? 0 : std::stoul(text.substr(place + 16));
    while (unread_.size() < left && receive()) continue;
    left = std::min(left, unread_.size());
    text += unread_.substr(0, left);
    unread_.erase(0, left);
    return text;
  }
  void request(const std::string& method, const std::string& path, const std::string& body = "",
               const std::string& headers = "") const {
    send(method + " " + path + " HTTP/1.1\r\nHost: test\r\n" + headers +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
  }
  std::string ask(const std::string& method, const std::string& path, const std::string& body = "",
                  const std::string& headers = "") {
    request(method, path, body, headers);
    return answer();
  }
  /// Waits until all that was sent lies in the server's socket, read or not.
  void await_arrival() const {
    for (int left = 1; left > 0;) {
      if (ioctl(socket_, SIOCOUTQ, &left) != 0)
        throw std::runtime_error("the test's client cannot see what has arrived");
      std::this_thread::yield();
    }
  }

 private:
  /// Adds what comes to what is unread; false at the end of the connection.
  bool receive() {
    char piece[4096];
    ssize_t count = 0;
    do {
      count = recv(socket_, piece, sizeof piece, 0);
    } while (count < 0 && errno == EINTR);
    if (count > 0) unread_.append(piece, static_cast<std::size_t>(count));
    return count > 0;
  }

  int socket_;
  std::string unread_;
};

/// The body of an answer; empty without an answer, as where the server has hung up.
inline std::string body_of(const std::string& answer) {
  const std::size_t head = answer.find("\r\n\r\n");
  return head == std::string::npos ? "" : answer.substr(head + 4);
}
inline int status_of(const std::string& answer) {
  return answer.size() < 12 ? 0 : std::stoi(answer.substr(9, 3));
}

}  // namespace heddle::serve::testing
