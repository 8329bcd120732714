#include "data/batch_upload.h"

namespace heddle::data {

at::Tensor upload(const at::Tensor& host, c10::Device device) {
  // A copy from pageable memory waits for all that is queued; the pinned block is kept until the
  // copy is done.
  return device.is_cuda() && host.is_cpu() ? host.pin_memory().to(device, /*non_blocking=*/true)
                                           : host.to(device);
}

}  // namespace heddle::data
