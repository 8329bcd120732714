// A process group for the simulated NPU, with the shape of HCCL's: what HCCL would answer with a
// hang is refused by name, the rest goes over Gloo on the same memory.

#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/device_backend.h"
#include "comm/gloo.h"
#include "device/sim/capture.h"
#include "device/sim/driver.h"
#include "device/sim/rules.h"
#include "device/sim/streams.h"

namespace heddle::comm {
namespace {

using device::sim::host_view;
using device::sim::Rule;
using Work = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

template <class... Args>
[[noreturn]] void deny(Rule rule, fmt::format_string<Args...> text, Args&&... args) {
  device::sim::refuse<CommError>(rule, text, std::forward<Args>(args)...);
}

class SimulatedHccl;

/// The communicators that live in this process: HCCL knows each by its group, and hangs when one is
/// made twice.
class Communicators {
 public:
  static Communicators& all() {
    static Communicators made;
    return made;
  }
  void add(const SimulatedHccl& communicator);
  void remove(const SimulatedHccl& communicator);

 private:
  std::mutex mutex_;
  std::map<std::string, const SimulatedHccl*> live_;
};

class SimulatedHccl final : public c10d::Backend {
 public:
  SimulatedHccl(const Store& store, const DeviceGroupOptions& options)
      : Backend(static_cast<int>(options.rank), static_cast<int>(options.ranks.size())),
        name_(options.name),
        key_(fmt::format("{}:{}:{}:{}", options.master_port, options.name,
                         fmt::join(options.ranks, ","), options.rank)) {
    device::sim::require_running("a process group");
    device::sim::count_entry("ProcessGroupHCCL::Options::create");
    device::sim::count_entry("c10d_npu::ProcessGroupHCCL");
    Communicators::all().add(*this);
    // All simulated devices are of one host.
    try {
      gloo_ = make_gloo(store, options.rank, static_cast<std::int64_t>(options.ranks.size()),
                        "127.0.0.1", options.timeout);
    } catch (...) {
      Communicators::all().remove(*this);
      throw;
    }
  }
  ~SimulatedHccl() override { Communicators::all().remove(*this); }

  const std::string getBackendName() const override { return "hccl"; }
  const std::string& name() const { return name_; }
  /// The port of its rendezvous, its ranks and this one's place.
  const std::string& key() const { return key_; }

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensors views = lower("all_reduce", tensors);
    return gloo_->allreduce(views, options);
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors views = lower("broadcast", tensors);
    return gloo_->broadcast(views, options);
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& options) override {
    Tensors views = lower("all_gather", {output, input});
    return gloo_->_allgather_base(views[0], views[1], options);
  }
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override {
    Tensors views = lower("reduce_scatter", {output, input});
    return gloo_->_reduce_scatter_base(views[0], views[1], options);
  }
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) override {
    Tensors out = lower("all_gather", outputs), in = lower("all_gather", inputs);
    return gloo_->allgather_into_tensor_coalesced(out, in, options);
  }
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override {
    Tensors out = lower("reduce_scatter", outputs), in = lower("reduce_scatter", inputs);
    return gloo_->reduce_scatter_tensor_coalesced(out, in, options);
  }
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_rows,
                     std::vector<std::int64_t>& input_rows,
                     const c10d::AllToAllOptions& options) override {
    Tensors views = lower("all_to_all", {output, input});
    return gloo_->alltoall_base(views[0], views[1], output_rows, input_rows, options);
  }
  Work send(Tensors& tensors, int to, int tag) override {
    Tensors views = lower("send", tensors);
    return gloo_->send(views, to, tag);
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    Tensors views = lower("receive", tensors);
    return gloo_->recv(views, from, tag);
  }

 private:
  /// The tensors as Gloo takes them. Throws CommError where HCCL would fail or hang.
  Tensors lower(const char* operation, const Tensors& tensors) {
    device::sim::require_running(operation);
    if (device::sim::Capture::current() != nullptr)
      deny(Rule::kCapture, "{} of group {}: a graph holds no collective", operation, name_);
    if (std::this_thread::get_id() != owner_) {
      deny(Rule::kThread, "{} of group {}: collectives come from the thread that owns the device",
           operation, name_);
    }
    // Work that the stream has queued comes before the collective.
    device::sim::Streams::all().publish(device::sim::current_stream());
    Tensors views;
    for (const at::Tensor& tensor : tensors) {
      if (tensor.device().type() != c10::DeviceType::PrivateUse1) {
        deny(Rule::kPayload,
             "{} of group {}: a tensor of {}; what is not on the device "
             "travels over Gloo",
             operation, name_, tensor.device().str());
      }
      if (tensor.element_size() == 1) {
        deny(Rule::kPayload, "{} of group {}: {} elements; bytes and objects travel over Gloo",
             operation, name_, c10::toString(tensor.scalar_type()));
      }
      views.push_back(host_view(tensor));
    }
    return views;
  }

  std::string name_, key_;
  std::thread::id owner_ = std::this_thread::get_id();
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

void Communicators::add(const SimulatedHccl& communicator) {
  const std::scoped_lock lock(mutex_);
  for (const auto& [key, other] : live_) {
    if (!other->getBoundDeviceId()) continue;
    deny(Rule::kBoundGroup,
         "group {} is made while group {} is bound to {}: its members would wait for ranks that "
         "are not in it",
         communicator.name(), other->name(), other->getBoundDeviceId()->str());
  }
  if (!live_.emplace(communicator.key(), &communicator).second) {
    deny(Rule::kReuse, "group {} has a communicator already (port:name:ranks:place {}); reuse it",
         communicator.name(), communicator.key());
  }
}

void Communicators::remove(const SimulatedHccl& communicator) {
  const std::scoped_lock lock(mutex_);
  const auto found = live_.find(communicator.key());
  if (found != live_.end() && found->second == &communicator) live_.erase(found);
}

}  // namespace

Backend make_hccl(const Store& store, const DeviceGroupOptions& options) {
  return c10::make_intrusive<SimulatedHccl>(store, options);
}

c10::intrusive_ptr<c10d::Work> hccl_without_results(const c10::intrusive_ptr<c10d::Work>& work) {
  return work;  // Gloo's own, results and all
}

}  // namespace heddle::comm
