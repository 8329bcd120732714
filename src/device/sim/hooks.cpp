#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>

#include <memory>
#include <mutex>
#include <unordered_set>

#include "device/sim/driver.h"
#include "device/sim/rules.h"

namespace heddle::device::sim {
namespace {

/// A generator of the device: one of the CPU behind its name.
class Generator final : public c10::GeneratorImpl {
 public:
  Generator(c10::DeviceIndex device, at::Generator host)
      : GeneratorImpl(c10::Device(kType, device),
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}
  void set_current_seed(std::uint64_t seed) override { host_.set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { host_.set_offset(offset); }
  std::uint64_t get_offset() const override { return host_.get_offset(); }
  std::uint64_t current_seed() const override { return host_.current_seed(); }
  std::uint64_t seed() override { return host_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }
  at::Generator host() const { return host_; }

 private:
  Generator* clone_impl() const override { return new Generator(device_.index(), host_.clone()); }
  at::Generator host_;
};

at::Generator make(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* const made = [] {
    auto* all = new std::vector<at::Generator>;
    for (c10::DeviceIndex i = 0; i < kDevices; ++i) all->push_back(make(i));
    return all;
  }();
  return made->at(static_cast<std::size_t>(device < 0 ? current_device() : device));
}

/// Host memory that the device can read while the host goes on.
class PinnedMemory final : public at::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    auto block = std::make_unique<c10::DataPtr>(c10::GetCPUAllocator()->allocate(bytes));
    void* const address = block->get();
    const std::scoped_lock lock(mutex());
    addresses().insert(address);
    return {address, block.release(), &free, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  static bool holds(const void* address) {
    const std::scoped_lock lock(mutex());
    return addresses().contains(address);
  }

 private:
  static std::mutex& mutex() {
    static auto* const made = new std::mutex;
    return *made;
  }
  static std::unordered_set<const void*>& addresses() {
    static auto* const made = new std::unordered_set<const void*>;
    return *made;
  }
  static void free(void* context) {
    const std::unique_ptr<c10::DataPtr> block(static_cast<c10::DataPtr*>(context));
    const std::scoped_lock lock(mutex());
    addresses().erase(block->get());
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return is_running(); }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return make(device < 0 ? current_device() : device);
  }
  at::Device getDeviceFromPtr(void*) const override {
    refuse(Rule::kHostAccess, "a device is asked for by an address");
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* const made = new PinnedMemory;
    return made;
  }
  bool isPinnedPtr(const void* address) const override { return PinnedMemory::holds(address); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override;
};

void Hooks::resizePrivateUse1Bytes(const c10::Storage&, std::size_t) const {
  throw InternalError("the storage of a device tensor is resized by a tensor, not by itself");
}

}  // namespace

at::Generator host_generator(const at::Generator& generator) {
  if (generator.device().type() != kType) {
    refuse(Rule::kMixedDevices, "a generator of {} for an operator of the device",
           generator.device().str());
  }
  return static_cast<const Generator*>(generator.unsafeGetGeneratorImpl())->host();
}

at::Generator host_generator(c10::DeviceIndex device) {
  return host_generator(default_generator(device));
}

bool is_pinned(const at::Tensor& host) { return PinnedMemory::holds(host.storage().data()); }

void install_hooks() {
  static auto* const hooks = new Hooks;
  at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace heddle::device::sim
