#include "comm/guarded_store.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "comm/store_greeting.h"

namespace heddle::comm {
namespace {

constexpr std::chrono::milliseconds kFirstPause{1}, kLongestPause{50};
// A look at the socket takes this much of an answer's time at most. A process that stood still in
// it has not waited longer than that, and finds an answer that came meanwhile.
constexpr std::chrono::milliseconds kLongestLook{100};

std::string_view text_of(const std::vector<std::uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::uint8_t> bytes_of(std::string_view text) { return {text.begin(), text.end()}; }

class GuardedStore : public c10d::Store {
 public:
  GuardedStore(Endpoint endpoint, std::string secret, std::chrono::milliseconds timeout,
               std::shared_ptr<StoreServer> server);
  ~GuardedStore() override;
  GuardedStore(const GuardedStore&) = delete;

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> compareSet(const std::string& key,
                                       const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& wanted) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  using Clock = std::chrono::steady_clock;
  /// Time that is left for an answer.
  struct Patience {
    Clock::duration left;
  };
  void open();
  std::string ask(StoreOperation operation, const std::vector<std::string_view>& fields);
  void send(std::string_view bytes, Patience& patience);
  std::string receive(std::size_t count, Patience& patience);
  void await(short events, Patience& patience);
  [[noreturn]] void lose(const std::string& reason);

  Endpoint endpoint_;
  std::string secret_;
  std::chrono::milliseconds answer_time_;
  std::shared_ptr<StoreServer> server_;
  std::mutex mutex_;  // one request and its answer at a time
  int socket_ = -1;
};

GuardedStore::GuardedStore(Endpoint endpoint, std::string secret, std::chrono::milliseconds timeout,
                           std::shared_ptr<StoreServer> server)
    : c10d::Store(timeout),
      endpoint_(std::move(endpoint)),
      secret_(std::move(secret)),
      answer_time_(timeout),
      server_(std::move(server)) {
  try {
    open();
  } catch (...) {
    if (socket_ >= 0) ::close(socket_);
    throw;
  }
}

GuardedStore::~GuardedStore() {
  if (socket_ >= 0) ::close(socket_);
}

void GuardedStore::open() {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(endpoint_.address().c_str(),
                                 std::to_string(endpoint_.port).c_str(), &hints, &found);
  if (status != 0)
    throw_error<CommError>("cannot resolve '{}': {}", endpoint_.address(), gai_strerror(status));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  Patience patience{answer_time_};
  int error = 0;
  for (const addrinfo* a = addresses.get(); a != nullptr && socket_ < 0; a = a->ai_next) {
    socket_ = ::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket_ < 0) continue;
    error = ::connect(socket_, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      await(POLLOUT, patience);
      socklen_t length = sizeof error;
      ::getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &length);
    }
    if (error == 0) continue;
    ::close(socket_);
    socket_ = -1;
  }
  if (socket_ < 0) throw_error<CommError>("cannot connect: {}", std::strerror(error));
  const int on = 1;
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);

  const std::string hello = receive(kStoreHelloBytes, patience);
  if (!hello.starts_with(kStoreMagic)) lose("what answers is no store of Heddle");
  const std::string_view theirs = std::string_view(hello).substr(kStoreMagic.size());
  const hash::Key128 secret = hash::key_of(secret_), number = hash::random_key();
  const std::string_view own = as_text(number);
  send(std::string(own).append(as_text(proof(secret, "client", theirs, own))), patience);
  const std::string reply = receive(kStoreReplyBytes, patience);
  if (!hash::equal(as_key(reply), proof(secret, "store", theirs, own))) {
    lose(
        "it belongs to another job, whose secret is another; is this a process of an earlier run, "
        "or do two jobs use one port, or the hosts different secret files?");
  }
}

void GuardedStore::lose(const std::string& reason) {
  if (socket_ >= 0) ::close(std::exchange(socket_, -1));
  throw CommError(reason);
}

void GuardedStore::await(short events, Patience& patience) {
  while (patience.left > Clock::duration::zero()) {
    const auto look = std::min<Clock::duration>(patience.left, kLongestLook);
    const auto begun = Clock::now();
    pollfd waiting = {socket_, events, 0};
    const int ready = ::poll(
        &waiting, 1, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(look).count()));
    if (ready < 0 && errno != EINTR) lose(std::strerror(errno));
    patience.left -= std::min(look, Clock::now() - begun);
    if (ready > 0) return;
  }
  lose(fmt::format(
      "no answer for {:.3g} s; another program may hold the port, or its process is frozen",
      static_cast<double>(answer_time_.count()) * 1e-3));
}

void GuardedStore::send(std::string_view bytes, Patience& patience) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      await(POLLOUT, patience);
    } else if (errno != EINTR) {
      lose(fmt::format("the connection is lost: {}", std::strerror(errno)));
    }
  }
}

std::string GuardedStore::receive(std::size_t count, Patience& patience) {
  std::string bytes(count, '\0');
  for (std::size_t have = 0; have < count;) {
    const ssize_t got = ::recv(socket_, bytes.data() + have, count - have, 0);
    if (got > 0) {
      have += static_cast<std::size_t>(got);
    } else if (got == 0) {
      lose("the connection was closed by the other side");
    } else if (errno == EAGAIN) {
      await(POLLIN, patience);
    } else if (errno != EINTR) {
      lose(fmt::format("the connection is lost: {}", std::strerror(errno)));
    }
  }
  return bytes;
}

std::string GuardedStore::ask(StoreOperation operation,
                              const std::vector<std::string_view>& fields) {
  const std::scoped_lock lock(mutex_);
  if (socket_ < 0) throw CommError("the connection was lost before");
  Patience patience{answer_time_};
  const std::string request = store_request(operation, fields);
  if (request.size() > StoreTable::kLargestMessage) {
    throw_error<CommError>("a message of {} bytes is larger than a store takes", request.size());
  }
  send(framed(request), patience);
  std::size_t length = 0;
  const std::string announced = receive(4, patience);
  for (std::size_t i = 4; i-- > 0;) length = length << 8 | static_cast<unsigned char>(announced[i]);
  if (length == 0 || length > StoreTable::kLargestMessage + 1) lose("an answer of a wrong length");
  std::string answer = receive(length, patience);
  if (answer[0] == '\0') throw CommError(answer.substr(1));
  return answer.substr(1);
}

c10::intrusive_ptr<c10d::Store> GuardedStore::clone() {
  return c10::make_intrusive<GuardedStore>(endpoint_, secret_, answer_time_, server_);
}

void GuardedStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  ask(StoreOperation::kSet, {key, text_of(value)});
}

std::vector<std::uint8_t> GuardedStore::compareSet(const std::string& key,
                                                   const std::vector<std::uint8_t>& expected,
                                                   const std::vector<std::uint8_t>& wanted) {
  return bytes_of(ask(StoreOperation::kCompareSet, {key, text_of(expected), text_of(wanted)}));
}

std::vector<std::uint8_t> GuardedStore::get(const std::string& key) {
  std::string found = ask(StoreOperation::kGet, {key});
  if (found == "0") {
    wait({key});
    found = ask(StoreOperation::kGet, {key});
    if (found == "0") throw_error<CommError>("the key '{}' was removed", key);
  }
  return bytes_of(std::string_view(found).substr(1));
}

std::int64_t GuardedStore::add(const std::string& key, std::int64_t amount) {
  return std::stoll(ask(StoreOperation::kAdd, {key, std::to_string(amount)}));
}

bool GuardedStore::deleteKey(const std::string& key) {
  return ask(StoreOperation::kDelete, {key}) == "1";
}

bool GuardedStore::check(const std::vector<std::string>& keys) {
  return ask(StoreOperation::kCheck, {keys.begin(), keys.end()}) == "1";
}

std::int64_t GuardedStore::getNumKeys() { return std::stoll(ask(StoreOperation::kCount, {})); }

void GuardedStore::wait(const std::vector<std::string>& keys) { wait(keys, getTimeout()); }

void GuardedStore::wait(const std::vector<std::string>& keys,
                        const std::chrono::milliseconds& timeout) {
  // Asked for again and again, so that others may use the connection meanwhile.
  const auto deadline = Clock::now() + timeout;
  auto pause = kFirstPause;
  while (!check(keys)) {
    if (timeout != kNoTimeout && Clock::now() >= deadline) {
      throw_error<CommError>("waited {:.3g} s for the key '{}'",
                             static_cast<double>(timeout.count()) * 1e-3, keys.front());
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Store> open_guarded_store(const Endpoint& endpoint,
                                                   const std::string& secret,
                                                   std::chrono::milliseconds timeout,
                                                   std::shared_ptr<StoreServer> server) {
  return c10::make_intrusive<GuardedStore>(endpoint, secret, timeout, std::move(server));
}

}  // namespace heddle::comm
