#include "parallel/activation_offload.h"

#include <ATen/ops/empty.h>

namespace heddle::parallel {

void ActivationOffload::send(KeptActivation& kept) {
  kept.on_host = device::host_like(kept.on_device);
  kept.copy = to_host_.begin(kept.on_host, kept.on_device);
}

void ActivationOffload::release(KeptActivation& kept) {
  if (!kept.on_host.defined()) return;
  kept.copy.wait();
  kept.on_device.reset();
}

void ActivationOffload::prefetch(KeptActivation& kept) {
  if (kept.on_device.defined()) return;
  kept.on_device =
      at::empty(kept.on_host.sizes(), at::TensorOptions(kept.on_host.dtype()).device(device_));
  kept.copy = to_device_.begin(kept.on_device, kept.on_host);
}

at::Tensor ActivationOffload::take(KeptActivation kept) {
  prefetch(kept);
  kept.copy.wait();  // whichever way it went: nobody may write to what is still read
  return kept.on_device;
}

}  // namespace heddle::parallel
