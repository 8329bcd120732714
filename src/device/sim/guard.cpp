#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <limits>

#include "device/sim/driver.h"
#include "device/sim/rules.h"
#include "device/sim/streams.h"

namespace heddle::device::sim {
namespace {

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<c10::StreamId, kDevices> stream_of_thread{};

c10::DeviceIndex checked(c10::Device device) {
  if (device.index() >= kDevices)
    throw_error<DeviceError>("npu:{}: the simulation has {} devices", device.index(), kDevices);
  return device.index() < 0 ? device_of_thread : device.index();
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    count_entry("c10_npu::NPUGuard");
    const c10::Device before = getDevice();
    if (before != device) setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kType, device_of_thread); }
  void setDevice(c10::Device device) const override {
    count_entry("c10_npu::set_device");
    device_of_thread = checked(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    device_of_thread = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    count_entry("c10_npu::getCurrentNPUStream");
    return stream(device, stream_of_thread[static_cast<std::size_t>(checked(device))]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    count_entry("c10_npu::getNPUStreamFromPool");
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> made = 0;
    return stream(device, 1 + made++ % kStreams);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    count_entry("c10_npu::NPUStreamGuard");
    const c10::Stream before = getStream(next.device());
    stream_of_thread[static_cast<std::size_t>(checked(next.device()))] = next.id();
    return before;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    require_running("an event");
    count_entry("NPUEvent::record");
    if (*event == nullptr) *event = new Event{stream, 0};
    *static_cast<Event*>(*event) = {stream, Streams::all().position(stream)};
  }
  void block(void* event, const c10::Stream&) const override {
    require_running("an event");
    count_entry("NPUEvent::block");
    if (event != nullptr) publish(event);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const auto* recorded = static_cast<const Event*>(event);
    return Streams::all().is_published(recorded->stream, recorded->position);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    return Streams::all().is_published(stream, std::numeric_limits<std::int64_t>::max());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count();
    Streams::all().publish(stream);
  }
  void synchronizeEvent(void* event) const override {
    count();
    if (event != nullptr) publish(event);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    count_entry("c10_npu::device_synchronize");
    count();
    Streams::all().publish_all(device);
  }

 private:
  static constexpr c10::StreamId kStreams = 32;
  struct Event {
    c10::Stream stream;
    std::int64_t position;
  };
  static void publish(void* event) {
    const auto* recorded = static_cast<const Event*>(event);
    Streams::all().publish(recorded->stream, recorded->position);
  }

  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, checked(device)), id);
  }
  static void count() {
    require_running("a synchronisation");
    wait("synchronize");
  }
};

}  // namespace

c10::DeviceIndex current_device() { return device_of_thread; }

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device),
                     stream_of_thread[static_cast<std::size_t>(device)]);
}
c10::Stream current_stream() { return current_stream(device_of_thread); }

void install_guard() {
  static const auto* const guard = new Guard;
  c10::impl::registerDeviceGuard(kType, guard);
}

}  // namespace heddle::device::sim
