#pragma once

#include <ATen/core/Tensor.h>

#include "device/copy_stream.h"

namespace heddle::parallel {

/// A tensor that waits for its backward: on the device or, once it was sent there, on the host; on
/// both while it travels.
struct KeptActivation {
  at::Tensor on_device, on_host;
  device::CopyStream::Copy copy;
};

/// Moves activations to the host and back beside the computation. All of it is queued: the host
/// never waits.
class ActivationOffload {
 public:
  explicit ActivationOffload(c10::Device device)
      : device_(device), to_host_(device), to_device_(device) {}

  /// Begins the copy to the host.
  void send(KeptActivation& kept);
  /// Its memory on the device is free for what is queued from now on, which comes after the copy.
  /// Nothing to do for one that was not sent.
  void release(KeptActivation& kept);
  /// Begins the copy back; nothing to do for one that is on the device.
  void prefetch(KeptActivation& kept);
  /// The tensor, on the device.
  at::Tensor take(KeptActivation kept);

 private:
  c10::Device device_;
  device::CopyStream to_host_, to_device_;
};

}  // namespace heddle::parallel
