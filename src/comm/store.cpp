#include "comm/store.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "comm/deadline.h"
#include "comm/guarded_store.h"
#include "comm/reach.h"
#include "comm/store_handle.h"
#include "comm/store_server.h"

namespace heddle::comm {
namespace {

constexpr std::chrono::milliseconds kSlice{50};
// An error thrown inside says more than that the time is over, so it gets to speak first.
constexpr Seconds kConnectSlack{2};
constexpr std::chrono::milliseconds kLongestPause{200}, kShortestTimeout{5000};

std::chrono::milliseconds milliseconds(Seconds time) {
  // 0 would mean "without end".
  return std::max(std::chrono::milliseconds(1),
                  std::chrono::duration_cast<std::chrono::milliseconds>(time));
}

/// Time that one answer may take, a greeting too: a shorter one would end it at once on a busy
/// host.
std::chrono::milliseconds answer_time(Seconds timeout) {
  return std::max(milliseconds(timeout), kShortestTimeout);
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// Runs a call of c10d and turns what it throws into a CommError.
template <class F>
auto guarded(const Endpoint& endpoint, const char* operation, F&& call) {
  try {
    return call();
  } catch (const ConfigError& error) {
    throw_error<ConfigError>("the rendezvous store {}: {}", endpoint.to_string(), error.what());
  } catch (const std::exception& error) {
    throw_error<CommError>("{} at the rendezvous store {}: {}", operation, endpoint.to_string(),
                           first_line(error.what()));
  }
}

std::shared_ptr<const StoreHandle> wrap(c10::intrusive_ptr<c10d::Store> store) {
  return std::make_shared<StoreHandle>(StoreHandle{std::move(store)});
}

/// Calls `make` on another thread: a resolver, and c10d with a peer that is no store, know no
/// deadline.
template <class Make>
std::shared_ptr<const StoreHandle> open_store(const Endpoint& endpoint, const char* operation,
                                              Seconds timeout, Make make) {
  // Slices are counted: where this process stood still, `make` has had no time either.
  const Seconds time = answer_time(timeout);
  Seconds left = time + kConnectSlack;
  return guarded(endpoint, operation, [&] {
    return run_watched(std::move(make), kSlice, [&] {
      left -= kSlice;
      if (left > Seconds(0)) return;
      throw_error<CommError>(
          "no answer for {:.3g} s; another program may hold the port, or the resolver is slow",
          time.count());
    });
  });
}

}  // namespace

Store::Store(std::shared_ptr<const StoreHandle> handle, Endpoint endpoint)
    : handle_(std::move(handle)), endpoint_(std::move(endpoint)) {}

Store Store::serve(Listener listener, Seconds timeout, const std::string& secret) {
  const Endpoint endpoint = listener.local_endpoint();
  const auto server = std::make_shared<StoreServer>(std::move(listener), secret);
  return {
      open_store(
          endpoint, "serving", timeout,
          [=] { return wrap(open_guarded_store(endpoint, secret, answer_time(timeout), server)); }),
      endpoint};
}

Store Store::connect(const Endpoint& endpoint, Seconds timeout, const std::string& secret) {
  return {open_store(endpoint, "connecting", timeout,
                     [=] {
                       wait_for_listener(endpoint, timeout);
                       return wrap(open_guarded_store(endpoint, secret, answer_time(timeout)));
                     }),
          endpoint};
}

Store Store::connect_unguarded(const Endpoint& endpoint, Seconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = endpoint.port;
  options.waitWorkers = false;  // who has arrived is counted above, with names
  options.timeout = answer_time(timeout);
  return {
      open_store(endpoint, "connecting", timeout,
                 [=] {
                   wait_for_listener(endpoint, timeout);
                   return wrap(c10::make_intrusive<c10d::TCPStore>(endpoint.address(), options));
                 }),
      endpoint};
}

Store Store::reconnected() const {
  return {guarded(endpoint_, "connecting", [&] { return wrap(handle_->store->clone()); }),
          endpoint_};
}

Store Store::below(const std::string& prefix) const {
  return {wrap(c10::make_intrusive<c10d::PrefixStore>(prefix, handle_->store)), endpoint_};
}

void Store::set(const std::string& key, std::string_view value) const {
  guarded(endpoint_, "set", [&] { handle_->store->set(key, std::string(value)); });
}

std::string Store::set_if_absent(const std::string& key, const std::string& value) const {
  return guarded(endpoint_, "compare_set",
                 [&] { return handle_->store->compareSet(key, "", value); });
}

std::int64_t Store::add(const std::string& key, std::int64_t amount) const {
  return guarded(endpoint_, "add", [&] { return handle_->store->add(key, amount); });
}

std::optional<std::string> Store::find(const std::string& key) const {
  return guarded(endpoint_, "get", [&]() -> std::optional<std::string> {
    if (!handle_->store->check({key})) return std::nullopt;
    return handle_->store->get_to_str(key);
  });
}

std::optional<std::string> Store::wait(const std::string& key, Seconds timeout) const {
  // Asked for again and again: a wait inside c10d would hold the connection.
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::chrono::milliseconds pause{2};
  for (;;) {
    if (auto found = find(key)) return found;
    if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

}  // namespace heddle::comm
