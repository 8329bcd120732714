#include "device/sim/graph.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "device/sim/capture.h"
#include "device/sim/driver.h"
#include "device/sim/rules.h"
#include "device/sim/streams.h"

namespace heddle::device::sim {
namespace {

// NaN in every floating type, -1 in every integer.
constexpr int kNotRun = 0xFF;

Capture*& current_capture() {
  thread_local Capture* capture = nullptr;
  return capture;
}

c10::intrusive_ptr<c10::StorageImpl> storage_of(const at::Tensor& host) {
  return c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(host.storage().unsafeGetStorageImpl());
}

class RecordedGraph final : public Graph {
 public:
  RecordedGraph(c10::Device device, const std::function<void()>& work) {
    const c10::DeviceGuard on_device(device);
    const c10::impl::VirtualGuardImpl guard(kType);
    const c10::Stream stream = guard.getStreamFromGlobalPool(device);
    c10::Event event(kType);
    event.record(guard.getStream(device));
    event.block(stream);
    const c10::StreamGuard on_stream(stream);
    count_entry("NPUGraph::capture_begin");
    Capture capture;
    try {
      work();
    } catch (...) {
      capture.finish();
      count_entry("NPUGraph::capture_end");
      count_entry("NPUGraph::reset");
      throw;
    }
    work_ = capture.finish();
    count_entry("NPUGraph::capture_end");
  }

  void replay() override {
    require_running("a graph");
    count_entry("NPUGraph::replay");
    for (const auto& one : work_) one();
  }

 private:
  std::vector<std::function<void()>> work_;
};

}  // namespace

Capture::Capture() {
  if (current_capture() != nullptr)
    refuse(Rule::kCapture, "a graph is recorded while this thread records another");
  current_capture() = this;
}

Capture::~Capture() { current_capture() = nullptr; }

Capture* Capture::current() { return current_capture(); }

void Capture::keeps(const at::Tensor& host) {
  const Storage storage = storage_of(host);
  const bool is_new = std::find(made_.begin(), made_.end(), storage) != made_.end();
  if (is_new || before_.contains(storage)) return;
  const auto* const bytes = static_cast<const char*>(storage->data());
  before_.emplace(storage, std::vector<char>(bytes, bytes + storage->nbytes()));
}

std::vector<std::function<void()>> Capture::finish() {
  const Streams::Work work(current_stream());  // shows the memory as the stream sees it
  for (const auto& [storage, bytes] : before_)
    std::memcpy(storage->mutable_data(), bytes.data(), std::min(bytes.size(), storage->nbytes()));
  for (const Storage& storage : made_) {
    if (storage->nbytes() > 0) std::memset(storage->mutable_data(), kNotRun, storage->nbytes());
  }
  current_capture() = nullptr;
  return std::move(work_);
}

std::unique_ptr<Graph> record(int index, const std::function<void()>& work,
                              const Graph* /*neighbour*/) {
  return std::make_unique<RecordedGraph>(c10::Device(kType, static_cast<c10::DeviceIndex>(index)),
                                         work);
}

}  // namespace heddle::device::sim
