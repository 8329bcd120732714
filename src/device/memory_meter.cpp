#include "device/memory_meter.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <atomic>

#include "base/errors.h"
#include "device/device.h"

namespace heddle::device {

constexpr auto kKind = c10::DebugInfoKind::PROFILER_STATE;

/// Reports of libtorch's allocators about each allocation and deallocation on the thread.
class MemoryMeter::Reports : public c10::MemoryReportingInfoBase {
 public:
  Reports(c10::DeviceType type, std::int64_t used) : type_(type), used_(used), peak_(used) {}

  // Threads of one kernel may report too.
  void reportMemoryUsage(void*, std::int64_t bytes, std::size_t total_allocated, std::size_t,
                         c10::Device device) override {
    if (device.type() != type_) return;
    const std::int64_t used =
        device.is_cpu() ? used_ += bytes : used_ = static_cast<std::int64_t>(total_allocated);
    std::int64_t peak = peak_;
    while (used > peak && !peak_.compare_exchange_weak(peak, used)) {
    }
  }
  bool memoryProfilingEnabled() const override { return true; }

  std::int64_t used() const { return used_; }
  std::int64_t take_peak(std::int64_t used) { return std::max(used, peak_.exchange(used)); }

 private:
  c10::DeviceType type_;
  std::atomic<std::int64_t> used_, peak_;
};

bool MemoryMeter::is_possible() { return c10::ThreadLocalDebugInfo::get(kKind) == nullptr; }

MemoryMeter::MemoryMeter(c10::Device device)
    : device_(device), start_bytes_(device.is_cpu() ? 0 : memory(device).used_bytes) {
  if (!is_possible()) throw_error<InternalError>("a memory meter beside a profiler");
  reports_ = std::make_shared<Reports>(device.type(), start_bytes_);
  c10::ThreadLocalDebugInfo::_push(kKind, reports_);
}

MemoryMeter::~MemoryMeter() { c10::ThreadLocalDebugInfo::_pop(kKind); }

std::int64_t MemoryMeter::used_bytes() const {
  // Other threads (of collectives) free memory of an accelerator too.
  return (device_.is_cpu() ? reports_->used() : memory(device_).used_bytes) - start_bytes_;
}

std::int64_t MemoryMeter::take_peak() {
  return reports_->take_peak(used_bytes() + start_bytes_) - start_bytes_;
}

}  // namespace heddle::device
