#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/device_backend.h"
#include "comm/group.h"
#include "comm/world.h"

namespace c10d {
class Work;
}

namespace heddle::comm {

/// The members of a group and, once they are used, their process groups: Gloo's for tensors of the
/// host, and with them objects and single numbers, and the device's for its own tensors. On a
/// device each direction between two members has one more, as what is queued in one process group
/// waits for what was queued there before.
class Connection {
 public:
  using Start = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>;
  Connection(std::string name, std::vector<std::int64_t> ranks, std::shared_ptr<World> world,
             std::string identity);
  /// A connection of ranks without processes.
  Connection(std::string name, std::vector<std::int64_t> ranks, std::int64_t place);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const std::string& name() const { return name_; }
  std::int64_t rank() const { return rank_; }
  std::int64_t size() const {
    return ranks_.empty() ? 1 : static_cast<std::int64_t>(ranks_.size());
  }
  const std::vector<std::int64_t>& ranks() const { return ranks_; }
  bool has_processes() const { return world_ != nullptr; }

  /// Starts a collective of `tensors` and returns the handle of what must be waited for.
  Pending launch(const char* operation, std::vector<at::Tensor> tensors, const Start& start);
  /// Sends the tensor to a member, or receives it from there.
  Pending send(const at::Tensor& tensor, std::int64_t to, int tag);
  Pending receive(const at::Tensor& tensor, std::int64_t from, int tag);
  /// Does what Group::give_up says.
  void give_up();
  /// Does what Group::check says.
  void check() const;

 private:
  using Clock = std::chrono::steady_clock;

  Pending start(const char* operation, std::vector<at::Tensor> tensors, const Backend& backend,
                const Start& start);
  std::string describe(const char* operation) const;
  void check_shapes_only(const char* operation, const std::vector<at::Tensor>& tensors) const;
  void check(const char* operation, const std::vector<at::Tensor>& tensors) const;
  const Backend& collectives(const char* operation, c10::Device device);
  const Backend& messages(const char* operation, c10::Device device, std::int64_t from,
                          std::int64_t to);
  const Backend& host_backend();
  /// The device's process group of the places `places`, which `purpose` tells from others of them.
  const Backend& device_backend(const char* operation, c10::Device device,
                                const std::vector<std::int64_t>& places,
                                const std::string& purpose);
  /// Calls `make` on another thread, which gives up at the deadline or when another rank fails.
  Backend connect(const std::function<Backend()>& make);
  void wait(const char* operation, Clock::time_point begun, c10d::Work& work);
  void check_time(const char* operation, Clock::time_point begun);
  /// Throws the CommError of an operation that did not end.
  [[noreturn]] void give_up(const char* operation, Clock::time_point begun,
                            const std::string& reason, std::string cause = "");

  std::string name_;
  std::vector<std::int64_t> ranks_;
  std::shared_ptr<World> world_;
  std::string identity_;
  std::int64_t rank_ = 0;
  Backend host_backend_;
};

}  // namespace heddle::comm
