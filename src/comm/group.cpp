#include "comm/group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "comm/deadline.h"
#include "comm/gloo.h"
#include "comm/hccl.h"
#include "device/npu_error.h"

namespace heddle::comm {

/// What World::device_group() keeps. HCCL must be called by one thread, the device's.
struct DeviceGroup {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::thread::id owner;
};

namespace {

using Clock = std::chrono::steady_clock;
using Backend = c10::intrusive_ptr<c10d::Backend>;

// How often a waiting rank looks whether another one has failed.
constexpr std::chrono::milliseconds kSlice{500};

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string reason_of(const std::exception& error) {
  return device::explain_npu_error(error.what()).value_or(first_line(error.what()));
}

Seconds since(Clock::time_point start) { return Clock::now() - start; }

}  // namespace

/// The members of a group and, once they are used, their process groups: Gloo's for tensors of the
/// host, and with them objects and single numbers, the device's for its own tensors.
class Group::Connection {
 public:
  Connection(std::string name, std::vector<std::int64_t> ranks, std::shared_ptr<World> world,
             const std::string& identity)
      : name_(std::move(name)), ranks_(std::move(ranks)), world_(std::move(world)) {
    if (ranks_.empty()) return;
    const auto place = std::find(ranks_.begin(), ranks_.end(), world_->rank());
    if (place == ranks_.end()) {
      throw_error<InternalError>("rank {} is not in its group {}", world_->rank(), name_);
    }
    rank_ = place - ranks_.begin();
    key_ = fmt::format("group/{}/{}", identity, ranks_key());
  }

  ~Connection() {
    if (!world_ || !(world_->is_broken() || std::uncaught_exceptions() > 0)) return;
    // Their threads may wait for operations that will not end: then they go with the process.
    backend_.release();
    if (const auto& group = world_->device_group(ranks_key())) group->backend.release();
  }

  const std::string& name() const { return name_; }
  std::int64_t rank() const { return rank_; }
  std::int64_t size() const {
    return ranks_.empty() ? 1 : static_cast<std::int64_t>(ranks_.size());
  }
  const std::vector<std::int64_t>& ranks() const { return ranks_; }

  /// Starts `start` on the process group and returns the handle of what must be waited for.
  template <class F>
  Pending launch(const char* operation, std::vector<at::Tensor> kept, F&& start) {
    for (const at::Tensor& tensor : kept) check(operation, tensor);
    const auto begun = Clock::now();
    c10::intrusive_ptr<c10d::Work> work;
    const Backend backend = kept.front().is_cpu() ? host_backend() : device_backend(operation);
    const std::string activity = describe(operation);
    world_->set_activity(activity);
    try {
      work = start(*backend);
    } catch (const std::exception& error) {
      give_up(operation, begun, reason_of(error));
    }
    return Pending([this, operation, begun, work, activity, tensors = std::move(kept)] {
      world_->set_activity(activity);
      wait(operation, begun, *work);
      world_->set_activity("");
    });
  }

 private:
  std::string describe(const char* operation) const {
    return fmt::format("{} of group {} (ranks {})", operation, name_, fmt::join(ranks_, ", "));
  }

  std::string ranks_key() const { return fmt::format("{}", fmt::join(ranks_, ",")); }

  void check(const char* operation, const at::Tensor& tensor) const {
    const bool is_npu = tensor.device().type() == c10::DeviceType::PrivateUse1;
    if (!tensor.is_cpu() && !is_npu) {
      throw_error<CommError>(
          "{} of group {}: this version has process groups for tensors of the CPU (Gloo) and of "
          "Ascend NPUs (HCCL), this one is on {}",
          operation, name_, tensor.device().str());
    }
    if (!tensor.is_contiguous()) {
      throw_error<CommError>("{} of group {}: the tensor {} is not contiguous", operation, name_,
                             c10::str(tensor.sizes()));
    }
    // HCCL moves what fits its alignment; bytes are objects, and those belong to Gloo.
    if (is_npu && tensor.element_size() == 1) {
      throw_error<CommError>(
          "{} of group {}: tensors of one byte per element never travel over HCCL, this one is {}; "
          "objects go over Gloo",
          operation, name_, c10::toString(tensor.scalar_type()));
    }
  }

  Backend device_backend(const char* operation) {
    std::shared_ptr<DeviceGroup>& group = world_->device_group(ranks_key());
    if (!group) {
      HcclOptions options;
      options.name = name_;
      options.ranks = ranks_;
      options.rank = rank_;
      options.master_port = world_->environment().master.port;
      options.timeout = world_->timeout();
      const Store store = world_->store().reconnected().below("device/" + ranks_key());
      group = std::make_shared<DeviceGroup>(
          DeviceGroup{make_hccl(store, options), std::this_thread::get_id()});
    }
    if (group->owner != std::this_thread::get_id()) {
      throw_error<CommError>(
          "{} of group {} on rank {}: collectives of the device come from the thread that owns it, "
          "this is another one",
          operation, name_, world_->rank());
    }
    return group->backend;
  }

  Backend host_backend() {
    if (backend_) return backend_;
    const auto begun = Clock::now();
    world_->set_activity(describe("connect"));
    // Members that make a group of the same ranks again must not find the addresses of the last
    // one.
    const std::string key = fmt::format("{}/{}", key_, world_->count_group(key_));
    try {
      backend_ = run_watched(
          [store = world_->store().reconnected().below(key), rank = rank_, size = size(),
           address = world_->address(),
           timeout = world_->timeout()] { return make_gloo(store, rank, size, address, timeout); },
          kSlice, [&] { check_time("connect", begun); });
    } catch (const CommError&) {
      throw;
    } catch (const std::exception& error) {
      give_up("connect", begun, reason_of(error));
    }
    return backend_;
  }

  void wait(const char* operation, Clock::time_point begun, c10d::Work& work) {
    // Point to point, c10d waits for the transport itself, once and with the whole deadline.
    const bool is_sliced =
        std::strcmp(operation, "send") != 0 && std::strcmp(operation, "receive") != 0;
    for (;;) {
      try {
        work.wait(is_sliced
                      ? kSlice
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

  /// Throws if the deadline is over or another rank has failed.
  void check_time(const char* operation, Clock::time_point begun) {
    std::optional<std::string> failure;
    try {
      failure = world_->failure_of_another();
    } catch (const CommError& error) {
      failure = error.what();
    }
    if (failure) give_up(operation, begun, "", *failure);
    if (since(begun) > world_->timeout()) give_up(operation, begun, "");
  }

  /// Throws the CommError of an operation that did not end.
  [[noreturn]] void give_up(const char* operation, Clock::time_point begun,
                            const std::string& reason, std::string cause = "") {
    world_->set_broken();
    const double waited = since(begun).count();
    if (cause.empty()) {
      cause = world_->diagnose(ranks_);
      // Whoever failed has had the time to say so.
      try {
        if (const auto failure = world_->failure_of_another()) cause = *failure;
      } catch (const CommError&) {
      }
    }
    throw_error<CommError>("{} on rank {} gave up after {:.1f} s{}{}: {}", describe(operation),
                           world_->rank(), waited, reason.empty() ? "" : ": ", reason, cause);
  }

  std::string name_;
  std::vector<std::int64_t> ranks_;
  std::shared_ptr<World> world_;
  std::string key_;
  std::int64_t rank_ = 0;
  Backend backend_;
};

void Pending::wait() {
  if (!finish_) return;
  const auto finish = std::exchange(finish_, nullptr);
  finish();
}

Group::Group(std::string name)
    : connection_(std::make_shared<Connection>(std::move(name), std::vector<std::int64_t>{},
                                               nullptr, "")) {}

Group::Group(std::string name, std::vector<std::int64_t> ranks, std::shared_ptr<World> world,
             const std::string& identity) {
  if (ranks.size() == 1) ranks.clear();
  connection_ =
      std::make_shared<Connection>(std::move(name), std::move(ranks), std::move(world), identity);
}

const std::string& Group::name() const { return connection_->name(); }
std::int64_t Group::rank() const { return connection_->rank(); }
std::int64_t Group::size() const { return connection_->size(); }
const std::vector<std::int64_t>& Group::ranks() const { return connection_->ranks(); }

namespace {

c10d::AllreduceOptions reduction(c10d::ReduceOp::RedOpType op) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return options;
}

}  // namespace

void Group::all_reduce_sum(at::Tensor& tensor) const {
  if (size() == 1) return;
  std::vector<at::Tensor> tensors = {tensor};
  connection_
      ->launch(
          "all_reduce", {tensor},
          [&](c10d::Backend& b) { return b.allreduce(tensors, reduction(c10d::ReduceOp::SUM)); })
      .wait();
}

void Group::all_reduce_max(at::Tensor& tensor) const {
  if (size() == 1) return;
  std::vector<at::Tensor> tensors = {tensor};
  connection_
      ->launch(
          "all_reduce", {tensor},
          [&](c10d::Backend& b) { return b.allreduce(tensors, reduction(c10d::ReduceOp::MAX)); })
      .wait();
}

double Group::all_reduce_sum(double value) const {
  if (size() == 1) return value;
  at::Tensor tensor = at::full({1}, value, at::kDouble);
  all_reduce_sum(tensor);
  return tensor.item<double>();
}

bool Group::any(bool value) const {
  if (size() == 1) return value;
  at::Tensor tensor = at::full({1}, value ? 1 : 0, at::kInt);
  all_reduce_max(tensor);
  return tensor.item<int>() != 0;
}

Pending Group::all_gather_async(at::Tensor& output, const at::Tensor& input) const {
  if (size() == 1) {
    output.copy_(input);
    return {};
  }
  return connection_->launch("all_gather", {output, input}, [&](c10d::Backend& b) {
    at::Tensor out = output, in = input;
    return b._allgather_base(out, in);
  });
}

void Group::all_gather(at::Tensor& output, const at::Tensor& input) const {
  all_gather_async(output, input).wait();
}

Pending Group::reduce_scatter_sum_async(at::Tensor& output, const at::Tensor& input) const {
  if (size() == 1) {
    output.copy_(input);
    return {};
  }
  return connection_->launch("reduce_scatter", {output, input}, [&](c10d::Backend& b) {
    at::Tensor out = output, in = input;
    return b._reduce_scatter_base(out, in);
  });
}

void Group::reduce_scatter_sum(at::Tensor& output, const at::Tensor& input) const {
  reduce_scatter_sum_async(output, input).wait();
}

void Group::all_to_all(at::Tensor& output, const std::vector<std::int64_t>& output_rows,
                       const at::Tensor& input, const std::vector<std::int64_t>& input_rows) const {
  if (size() == 1) {
    output.copy_(input);
    return;
  }
  connection_
      ->launch("all_to_all", {output, input},
               [&](c10d::Backend& b) {
                 at::Tensor out = output, in = input;
                 std::vector<std::int64_t> to = input_rows, from = output_rows;
                 return b.alltoall_base(out, in, from, to);
               })
      .wait();
}

void Group::broadcast(at::Tensor& tensor, std::int64_t root) const {
  if (size() == 1) return;
  connection_
      ->launch("broadcast", {tensor},
               [&](c10d::Backend& b) {
                 std::vector<at::Tensor> tensors = {tensor};
                 c10d::BroadcastOptions options;
                 options.rootRank = root;
                 return b.broadcast(tensors, options);
               })
      .wait();
}

void Group::send(const at::Tensor& tensor, std::int64_t to, int tag) const {
  send_async(tensor, to, tag).wait();
}

Pending Group::send_async(const at::Tensor& tensor, std::int64_t to, int tag) const {
  return connection_->launch("send", {tensor}, [&](c10d::Backend& b) {
    std::vector<at::Tensor> tensors = {tensor};
    return b.send(tensors, static_cast<int>(to), tag);
  });
}

void Group::receive(at::Tensor& tensor, std::int64_t from, int tag) const {
  connection_
      ->launch("receive", {tensor},
               [&](c10d::Backend& b) {
                 std::vector<at::Tensor> tensors = {tensor};
                 return b.recv(tensors, static_cast<int>(from), tag);
               })
      .wait();
}

void Group::barrier() const { any(false); }

std::vector<std::string> Group::all_gather_objects(const std::string& object) const {
  if (size() == 1) return {object};
  const at::Tensor own = at::full({1}, static_cast<std::int64_t>(object.size()), at::kLong);
  at::Tensor sizes = at::empty({size()}, at::kLong);
  all_gather(sizes, own);
  const auto* bytes = sizes.const_data_ptr<std::int64_t>();
  const std::int64_t longest = std::max<std::int64_t>(1, *std::max_element(bytes, bytes + size()));
  at::Tensor mine = at::zeros({longest}, at::kByte), all = at::empty({size() * longest}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), object.data(), object.size());
  all_gather(all, mine);
  std::vector<std::string> objects;
  const auto* text = static_cast<const char*>(all.const_data_ptr());
  for (std::int64_t r = 0; r < size(); ++r)
    objects.emplace_back(text + r * longest, static_cast<std::size_t>(bytes[r]));
  return objects;
}

}  // namespace heddle::comm
