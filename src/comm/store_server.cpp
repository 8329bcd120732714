#include "comm/store_server.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/log.h"
#include "comm/store_dialogue.h"

namespace heddle::comm {
namespace {

using Clock = std::chrono::steady_clock;

// How long a connection may take to show that it belongs to the job, and how many may try at once:
// the oldest gives way, and ranks need a millisecond.
constexpr std::chrono::seconds kGreetingTime{5};
constexpr std::size_t kMostStrangers = 128;
constexpr std::chrono::milliseconds kPause{10};
constexpr std::size_t kReadBytes = 1 << 16;

}  // namespace

struct StoreServer::Peer {
  int descriptor = -1;
  std::uint64_t number = 0;  // in the order of arrival
  Clock::time_point arrived;
  StoreDialogue dialogue;
};

StoreServer::StoreServer(Listener listener, const std::string& secret)
    : secret_(hash::key_of(secret)),
      where_(listener.local_endpoint().to_string()),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_ < 0) throw_error<CommError>("cannot serve a store: {}", std::strerror(errno));
  listener_ = listener.release();
  fcntl(listener_, F_SETFL, fcntl(listener_, F_GETFL) | O_NONBLOCK);
  // Signals stay with the threads that the program set up for them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

StoreServer::~StoreServer() {
  const std::uint64_t one = 1;
  while (write(wake_, &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
  for (const auto& [descriptor, peer] : peers_) close(descriptor);
  close(listener_);
  close(wake_);
}

void StoreServer::run() {
  std::vector<pollfd> waiting;
  while (true) {
    waiting = {{wake_, POLLIN, 0}, {listener_, POLLIN, 0}};
    for (const auto& [descriptor, peer] : peers_) {
      const std::string& out = peer.dialogue.out();
      const bool hears = out.size() < StoreDialogue::kMostUnread && !peer.dialogue.is_refused();
      const auto events = (hears ? POLLIN : 0) | (out.empty() ? 0 : POLLOUT);
      waiting.push_back({descriptor, static_cast<short>(events), 0});
    }
    if (poll(waiting.data(), waiting.size(), 1000) < 0 && errno != EINTR) return;
    if (waiting[0].revents != 0) return;
    for (std::size_t i = 2; i < waiting.size(); ++i) {
      if (waiting[i].revents == 0) continue;
      Peer& peer = peers_.at(waiting[i].fd);
      bool is_open = (waiting[i].revents & (POLLERR | POLLNVAL)) == 0;
      if (is_open && (waiting[i].revents & (POLLIN | POLLHUP)) != 0) is_open = hear(peer);
      if (is_open) is_open = flush(peer);
      while (is_open && peer.dialogue.is_paused() && peer.dialogue.out().empty())
        is_open = peer.dialogue.hear("", table_) && flush(peer);
      if (is_open) continue;
      close(peer.descriptor);
      peers_.erase(waiting[i].fd);
    }
    if (waiting[1].revents != 0) accept_all();
    drop_strangers(kMostStrangers);
  }
}

void StoreServer::accept_all() {
  while (true) {
    const int descriptor = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (descriptor < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // No descriptors left: strangers give theirs. Members alone need more than the limit then.
      if (errno == EMFILE || errno == ENFILE) {
        drop_strangers(0);
        std::this_thread::sleep_for(kPause);
      }
      return;
    }
    const int on = 1;
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    hash::Key128 challenge;
    try {
      challenge = hash::random_key();
    } catch (const Error&) {
      close(descriptor);
      return;
    }
    Peer peer{descriptor, accepted_++, Clock::now(), StoreDialogue(secret_, challenge)};
    if (flush(peer)) {
      peers_.emplace(descriptor, std::move(peer));
    } else {
      close(descriptor);
    }
  }
}

void StoreServer::drop_strangers(std::size_t most) {
  std::map<std::uint64_t, int> strangers;  // the oldest first
  for (const auto& [descriptor, peer] : peers_) {
    if (!peer.dialogue.is_member()) strangers.emplace(peer.number, descriptor);
  }
  std::size_t left = strangers.size();
  for (const auto& [number, descriptor] : strangers) {
    if (left <= most && Clock::now() - peers_.at(descriptor).arrived <= kGreetingTime) break;
    close(descriptor);
    peers_.erase(descriptor);
    --left;
  }
}

bool StoreServer::hear(Peer& peer) {
  std::array<char, kReadBytes> buffer;
  const ssize_t got = recv(peer.descriptor, buffer.data(), buffer.size(), 0);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return false;
  const bool was_refused = peer.dialogue.is_refused();
  const bool is_open = peer.dialogue.hear({buffer.data(), static_cast<std::size_t>(got)}, table_);
  if (peer.dialogue.is_refused() && !was_refused) say_refused(peer.descriptor);
  return is_open;
}

/// A process of an earlier run, or one that was given another secret, tries again and again.
void StoreServer::say_refused(int descriptor) {
  if (std::exchange(has_refused_, true)) return;
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  char host[NI_MAXHOST] = "an unknown address";
  if (getpeername(descriptor, reinterpret_cast<sockaddr*>(&address), &length) == 0) {
    getnameinfo(reinterpret_cast<sockaddr*>(&address), length, host, sizeof host, nullptr, 0,
                NI_NUMERICHOST);
  }
  log::warning(
      "the store at {} refused a process from {}, which has another secret; nothing is said of "
      "further ones",
      where_, host);
}

bool StoreServer::flush(Peer& peer) {
  std::string& out = peer.dialogue.out();
  while (!out.empty()) {
    const ssize_t sent = send(peer.descriptor, out.data(), out.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN;
    out.erase(0, static_cast<std::size_t>(sent));
  }
  return !peer.dialogue.is_refused();
}

}  // namespace heddle::comm
