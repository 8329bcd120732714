#pragma once

#include <cstdint>
#include <memory>

#include <c10/core/Device.h>

namespace heddle::device {

/// Follows what tensors of one device hold while a thread works on it, relative to the start of the
/// meter. An accelerator's figures are those of its allocator; on the CPU, whose ranks may be
/// threads, what this thread allocated and freed: what it allocates and a collective's thread frees
/// counts as held. One at a time on a thread, and not beside
/// libtorch's profiler.
class MemoryMeter {
 public:
  /// Throws InternalError if is_possible() is false.
  explicit MemoryMeter(c10::Device device);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// False while libtorch's profiler, which takes the same reports, runs on this thread.
  static bool is_possible();

  std::int64_t used_bytes() const;
  /// The highest use since the last call or the start.
  std::int64_t take_peak();

 private:
  class Reports;
  c10::Device device_;
  std::int64_t start_bytes_ = 0;
  std::shared_ptr<Reports> reports_;
};

}  // namespace heddle::device
