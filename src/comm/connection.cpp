#include "comm/connection.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "comm/deadline.h"
#include "comm/device_watch.h"
#include "comm/gloo.h"
#include "comm/look.h"
#include "device/npu_error.h"

namespace heddle::comm {
namespace {

constexpr auto kLook = std::chrono::duration_cast<std::chrono::milliseconds>(kLookForFailures);
// Places in a process group of two, whose messages go one way.
constexpr int kSender = 0, kReceiver = 1;

std::string reason_of(const std::exception& error) {
  const std::string text = error.what();
  if (const auto explained = device::explain_npu_error(text)) return *explained;
  std::string line = text.substr(0, text.find('\n'));
  // Gloo begins with "[/where/it/was/built/pair.cc:547] ", which tells a user nothing.
  const std::size_t bracket = line.find("] ");
  if (line.starts_with("[/") && bracket != std::string::npos) line.erase(0, bracket + 2);
  return line;
}

}  // namespace

/// State that World::device_group() keeps. HCCL must be called by one thread, the device's.
struct DeviceGroup {
  World& world;
  Backend backend;
  std::thread::id owner;

  DeviceGroup(World& w, Backend b)
      : world(w), backend(std::move(b)), owner(std::this_thread::get_id()) {
    world.device_watch().know(backend);
  }
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;
  ~DeviceGroup() {
    // Its threads may wait for operations that will not end: then they go with the process.
    if (world.is_broken()) {
      backend.release();
      return;
    }
    world.device_watch().forget(backend);
    backend->shutdown();
  }
};

Connection::Connection(std::string name, std::vector<std::int64_t> ranks,
                       std::shared_ptr<World> world, std::string identity)
    : name_(std::move(name)),
      ranks_(std::move(ranks)),
      world_(std::move(world)),
      identity_(std::move(identity)) {
  if (ranks_.empty()) return;
  const auto place = std::find(ranks_.begin(), ranks_.end(), world_->rank());
  if (place == ranks_.end()) {
    throw_error<InternalError>("rank {} is not in its group {}", world_->rank(), name_);
  }
  rank_ = place - ranks_.begin();
}

Connection::Connection(std::string name, std::vector<std::int64_t> ranks, std::int64_t place)
    : name_(std::move(name)), ranks_(std::move(ranks)), rank_(place) {}

Connection::~Connection() {
  if (!world_) return;
  if (std::uncaught_exceptions() > 0) world_->set_broken();
  // Its threads may wait for operations that will not end: then they go with the process.
  if (world_->is_broken()) host_backend_.release();
}

void Connection::give_up() {
  if (world_) world_->device_watch().give_up(fmt::format("group {} was given up", name_));
}

void Connection::check() const {
  if (world_) world_->device_watch().check();
}

Pending Connection::launch(const char* operation, std::vector<at::Tensor> tensors,
                           const Start& start) {
  check(operation, tensors);
  if (!has_processes()) {
    check_shapes_only(operation, tensors);
    return {};
  }
  const Backend& backend = collectives(operation, tensors.front().device());
  return this->start(operation, std::move(tensors), backend, start);
}

Pending Connection::send(const at::Tensor& tensor, std::int64_t to, int tag) {
  check("send", {tensor});
  if (!has_processes()) {
    check_shapes_only("send", {tensor});
    return {};
  }
  const bool is_cpu = tensor.is_cpu();
  const Backend& backend = messages("send", tensor.device(), rank_, to);
  return start("send", {tensor}, backend, [&](c10d::Backend& b) {
    std::vector<at::Tensor> tensors = {tensor};
    return b.send(tensors, is_cpu ? static_cast<int>(to) : kReceiver, is_cpu ? tag : 0);
  });
}

Pending Connection::receive(const at::Tensor& tensor, std::int64_t from, int tag) {
  check("receive", {tensor});
  if (!has_processes()) {
    check_shapes_only("receive", {tensor});
    return {};
  }
  const bool is_cpu = tensor.is_cpu();
  const Backend& backend = messages("receive", tensor.device(), from, rank_);
  return start("receive", {tensor}, backend, [&](c10d::Backend& b) {
    std::vector<at::Tensor> tensors = {tensor};
    return b.recv(tensors, is_cpu ? static_cast<int>(from) : kSender, is_cpu ? tag : 0);
  });
}

Pending Connection::start(const char* operation, std::vector<at::Tensor> tensors,
                          const Backend& backend, const Start& start) {
  const auto begun = Clock::now();
  const std::string activity = describe(operation);
  world_->device_watch().check();
  const auto announce = [this, operation, begun, activity] {
    try {
      world_->set_activity(activity);
    } catch (const CommError& error) {
      give_up(operation, begun, "", error.what());
    }
  };
  announce();
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = start(*backend);
  } catch (const std::exception& error) {
    give_up(operation, begun, reason_of(error));
  }
  if (!tensors.front().is_cpu()) {
    const bool is_nccl = tensors.front().is_cuda();
    world_->device_watch().add(activity, ranks_, backend,
                               is_nccl ? nccl_without_results(work) : hccl_without_results(work));
    // Lets the current stream wait, not the host.
    return Pending([this, operation, begun, work, kept = std::move(tensors)] {
      try {
        work->wait();
      } catch (const std::exception& error) {
        give_up(operation, begun, reason_of(error));
      }
    });
  }
  return Pending([this, operation, begun, work, announce, kept = std::move(tensors)] {
    announce();
    wait(operation, begun, *work);
    world_->set_activity("");
  });
}

std::string Connection::describe(const char* operation) const {
  return fmt::format("{} of group {} (ranks {})", operation, name_, fmt::join(ranks_, ", "));
}

void Connection::check_shapes_only(const char* operation,
                                   const std::vector<at::Tensor>& tensors) const {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_meta()) continue;
    throw_error<CommError>("{}: these ranks have no processes, and a tensor of {} cannot travel",
                           describe(operation), tensor.device().str());
  }
}

void Connection::check(const char* operation, const std::vector<at::Tensor>& tensors) const {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_contiguous()) {
      throw_error<CommError>("{} of group {}: the tensor {} is not contiguous", operation, name_,
                             c10::str(tensor.sizes()));
    }
    if (tensor.device() != tensors.front().device()) {
      throw_error<CommError>("{} of group {}: tensors of {} and of {}", operation, name_,
                             tensors.front().device().str(), tensor.device().str());
    }
    // HCCL moves what fits its alignment; bytes are objects, and those belong to Gloo.
    if (!tensor.is_cpu() && tensor.element_size() == 1) {
      throw_error<CommError>(
          "{} of group {}: tensors of one byte per element never travel over the library of a "
          "device, this one is {}; objects go over Gloo",
          operation, name_, c10::toString(tensor.scalar_type()));
    }
  }
}

const Backend& Connection::collectives(const char* operation, c10::Device device) {
  if (device.is_cpu()) return host_backend();
  std::vector<std::int64_t> places(ranks_.size());
  std::iota(places.begin(), places.end(), 0);
  return device_backend(operation, device, places, "collectives");
}

const Backend& Connection::messages(const char* operation, c10::Device device, std::int64_t from,
                                    std::int64_t to) {
  if (device.is_cpu()) return host_backend();
  return device_backend(operation, device, {from, to}, "messages of " + identity_);
}

const Backend& Connection::host_backend() {
  if (host_backend_) return host_backend_;
  // Members that make a group of the same ranks again must not find the addresses of the last one.
  const std::string group = fmt::format("group/{}/{}", identity_, fmt::join(ranks_, ","));
  const std::string key = fmt::format("{}/{}", group, world_->count_group(group));
  host_backend_ =
      connect([store = world_->store().reconnected().below(key), rank = rank_, size = size(),
               address = world_->address(), timeout = world_->timeout()] {
        return make_gloo(store, rank, size, address, timeout);
      });
  return host_backend_;
}

const Backend& Connection::device_backend(const char* operation, c10::Device device,
                                          const std::vector<std::int64_t>& places,
                                          const std::string& purpose) {
  DeviceGroupOptions options;
  for (const std::int64_t place : places) {
    if (place == rank_) options.rank = static_cast<std::int64_t>(options.ranks.size());
    options.ranks.push_back(ranks_[static_cast<std::size_t>(place)]);
  }
  const std::string key = fmt::format("device/{}/{}", purpose, fmt::join(options.ranks, ","));
  std::shared_ptr<DeviceGroup>& group = world_->device_group(key);
  if (!group) {
    options.name = key;
    options.device = device;
    options.master_port = world_->environment().master.port;
    options.timeout = world_->timeout();
    const Store store = world_->store().reconnected().below(key);
    group = std::make_shared<DeviceGroup>(
        *world_, device.is_cuda() ? connect([store, options] { return make_nccl(store, options); })
                                  : make_hccl(store, options));
  }
  if (group->owner != std::this_thread::get_id()) {
    throw_error<CommError>(
        "{} of group {} on rank {}: collectives of the device come from the thread that owns it, "
        "this is another one",
        operation, name_, world_->rank());
  }
  return group->backend;
}

Backend Connection::connect(const std::function<Backend()>& make) {
  const auto begun = Clock::now();
  world_->set_activity(describe("connect"));
  try {
    return run_watched(make, kLook, [&] { check_time("connect", begun); });
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    give_up("connect", begun, reason_of(error));
  }
}

void Connection::wait(const char* operation, Clock::time_point begun, c10d::Work& work) {
  // Point to point, Gloo waits for the transport itself, once and with the whole deadline.
  const bool is_sliced =
      std::strcmp(operation, "send") != 0 && std::strcmp(operation, "receive") != 0;
  for (;;) {
    try {
      work.wait(is_sliced
                    ? kLook
                    : std::chrono::duration_cast<std::chrono::milliseconds>(world_->timeout()));
      return;
    } catch (const std::exception& error) {
      if (!is_sliced || work.isCompleted()) {
        if (is_sliced && work.isSuccess()) return;  // it ended between the two calls
        give_up(operation, begun, reason_of(error));
      }
    }
    check_time(operation, begun);
  }
}

void Connection::check_time(const char* operation, Clock::time_point begun) {
  std::optional<std::string> failure;
  try {
    failure = world_->failure_of_another();
  } catch (const CommError& error) {
    failure = error.what();
  }
  if (failure) give_up(operation, begun, "", *failure);
  if (Clock::now() - begun > world_->timeout()) give_up(operation, begun, "");
}

void Connection::give_up(const char* operation, Clock::time_point begun, const std::string& reason,
                         std::string cause) {
  world_->set_broken();
  const Seconds waited = Clock::now() - begun;
  if (cause.empty()) {
    cause = world_->diagnose(ranks_);
    // Whoever failed has had the time to say so.
    try {
      if (const auto failure = world_->failure_of_another()) cause = *failure;
    } catch (const CommError&) {
    }
  }
  throw_error<CommError>("{} on rank {} gave up after {:.1f} s{}{}: {}", describe(operation),
                         world_->rank(), waited.count(), reason.empty() ? "" : ": ", reason, cause);
}

}  // namespace heddle::comm
