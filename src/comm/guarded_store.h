#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/endpoint.h"
#include "comm/store_server.h"

namespace heddle::comm {

/// c10d's Store over one connection to a StoreServer. A call that has no answer after the timeout
/// throws, and so do all after it. Included by sources only.
class GuardedStore : public c10d::Store {
 public:
  /// Throws CommError: nothing answers, what answers is no store, or it has another secret.
  /// `server`, if this process has it, lives as long as its clients.
  GuardedStore(Endpoint endpoint, std::string secret, std::chrono::milliseconds timeout,
               std::shared_ptr<StoreServer> server = nullptr);
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
  void open();
  std::string ask(StoreOperation operation, const std::vector<std::string_view>& fields);
  void send(std::string_view bytes, Clock::time_point deadline);
  std::string receive(std::size_t count, Clock::time_point deadline);
  void await(short events, Clock::time_point deadline);
  [[noreturn]] void lose(const std::string& reason);

  Endpoint endpoint_;
  std::string secret_;
  std::chrono::milliseconds answer_time_;
  std::shared_ptr<StoreServer> server_;
  std::mutex mutex_;  // one request and its answer at a time
  int socket_ = -1;
};

}  // namespace heddle::comm
