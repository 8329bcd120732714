#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "device/sim/capture.h"
#include "device/sim/driver.h"
#include "device/sim/rules.h"
#include "device/sim/streams.h"

namespace heddle::device::sim {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;
constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

// Neither x86-64 nor AArch64 maps it: what reads around data_ptr() faults.
constexpr std::uintptr_t kForeignBit = std::uintptr_t{1} << 54;

struct Ledger {
  std::mutex mutex;
  std::array<DeviceStats, kDevices> stats;

  void add(const Block& block) {
    const std::scoped_lock lock(mutex);
    DeviceStats& s = stats[static_cast<std::size_t>(block.device)];
    s.allocated_bytes[kAll].increase(static_cast<std::size_t>(block.bytes));
    s.allocation[kAll].increase(1);
    report(block, block.bytes, s);
  }
  void remove(const Block& block) {
    const std::scoped_lock lock(mutex);
    DeviceStats& s = stats[static_cast<std::size_t>(block.device)];
    s.allocated_bytes[kAll].decrease(static_cast<std::size_t>(block.bytes));
    s.allocation[kAll].decrease(1);
    report(block, -block.bytes, s);
  }

 private:
  /// As the device's own allocator reports.
  static void report(const Block& block, std::int64_t change, const DeviceStats& s) {
    const auto held = static_cast<std::size_t>(s.allocated_bytes[kAll].current);
    c10::reportMemoryUsageToProfiler(block.host->mutable_data(), change, held, held,
                                     c10::Device(kType, block.device));
  }
};

/// Never destroyed: tensors may outlive every static object.
Ledger& ledger() {
  static Ledger* const made = new Ledger;
  return *made;
}

void free_block(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  ledger().remove(*block);
  Streams::all().freed(*block->host, block->device, block->streams);
}

c10::DataPtr make_data_ptr(c10::intrusive_ptr<c10::StorageImpl> host, c10::DeviceIndex device) {
  auto block = std::make_unique<Block>();
  block->bytes = static_cast<std::int64_t>(host->nbytes());
  block->device = device;
  block->streams = {current_stream(device).id()};
  const auto address = reinterpret_cast<std::uintptr_t>(host->data());
  void* const shown = address == 0 ? nullptr : reinterpret_cast<void*>(address | kForeignBit);
  block->host = std::move(host);
  ledger().add(*block);
  return {shown, block.release(), &free_block, c10::Device(kType, device)};
}

c10::intrusive_ptr<c10::StorageImpl> allocate_host(std::size_t bytes) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               c10::GetCPUAllocator(), /*resizable=*/true);
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    require_running("an allocation");
    auto host = allocate_host(bytes);
    if (Capture* const capture = Capture::current()) capture->makes(host);
    return make_data_ptr(std::move(host), current_device());
  }
  void copy_data(void*, const void*, std::size_t) const override {
    refuse(Rule::kHostAccess, "memory of the device is copied by its address");
  }
  bool initialized() override { return is_running(); }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    static_cast<Block*>(data.get_context())->streams.push_back(stream.id());
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    count_entry("NPUCachingAllocator::getDeviceStats");
    const std::scoped_lock lock(ledger().mutex);
    return ledger().stats.at(static_cast<std::size_t>(device));
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::scoped_lock lock(ledger().mutex);
    ledger().stats.at(static_cast<std::size_t>(device)).allocated_bytes[kAll].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::scoped_lock lock(ledger().mutex);
    ledger().stats.at(static_cast<std::size_t>(device)).allocated_bytes[kAll].reset_peak();
  }
};

}  // namespace

c10::DeviceAllocator& allocator() {
  static auto* const made = new Allocator;
  return *made;
}

void protect(c10::StorageImpl& storage) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      broken(Rule::kHostAccess,
             "the memory of a device tensor is read on the host; copy the "
             "tensor first, with cpu() or to()"));
}

c10::Storage wrap(c10::intrusive_ptr<c10::StorageImpl> host, c10::DeviceIndex device) {
  const std::size_t bytes = host->nbytes();
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       make_data_ptr(std::move(host), device),
                                                       &allocator(), /*resizable=*/true);
  protect(*storage);
  return c10::Storage(std::move(storage));
}

namespace {

Block& block_of(const c10::Storage& storage) {
  const auto& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  auto* const block = static_cast<Block*>(data.get_context());
  if (block == nullptr) {
    refuse(Rule::kLifetime, "the memory of this tensor ({} bytes) was given up", storage.nbytes());
  }
  return *block;
}

}  // namespace

const c10::intrusive_ptr<c10::StorageImpl>& host_storage(const c10::Storage& storage) {
  return block_of(storage).host;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  block_of(tensor.storage()).streams.push_back(stream.id());
}

at::Tensor host_view(const at::Tensor& tensor) {
  auto view = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true);
  view->set_storage_keep_dtype(c10::Storage(host_storage(tensor.storage())));
  view->_change_backend_component_keys(c10::Device(c10::DeviceType::CPU));
  return at::Tensor(std::move(view));
}

void follow(const at::Tensor& tensor, const at::Tensor& view) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  // A copy: the block that holds it is replaced below.
  const c10::intrusive_ptr<c10::StorageImpl> host = host_storage(tensor.storage());
  if (storage->nbytes() != host->nbytes()) {
    // The host's storage was resized in place: the block has its new size.
    storage->set_data_ptr_noswap(make_data_ptr(host, storage->device().index()));
    storage->set_nbytes(host->nbytes());
  }
  if (tensor.sizes() != view.sizes() || tensor.strides() != view.strides() ||
      tensor.storage_offset() != view.storage_offset()) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(),
                                                        view.storage_offset());
  }
}

}  // namespace heddle::device::sim
