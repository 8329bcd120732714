#pragma once

#include <filesystem>
#include <memory>

#include <c10/core/Device.h>

namespace heddle::train {

/// Times every kernel and operator of what runs between its construction and finish(), through
/// libtorch's Kineto. One at a time in a process; the step it watches is slower than others.
class StepProfile {
 public:
  explicit StepProfile(c10::Device device);
  ~StepProfile();

  /// Waits for the device and writes into `directory`: profile.txt, a table of the device's kernels
  /// (on the CPU: of operators, each with what it calls) by total time and of its longest waits,
  /// and profile.json, a trace for chrome://tracing or Perfetto. Throws Error if a file cannot be
  /// written.
  void finish(const std::filesystem::path& directory);

 private:
  c10::Device device_;
  bool running_ = false;
};

}  // namespace heddle::train
