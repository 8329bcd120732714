#include "device/download.h"

#include "device/copy_stream.h"

namespace heddle::device {

Download::Download(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.is_cpu()) {
      copies_.push_back(tensor);
      continue;
    }
    copies_.push_back(host_like(tensor).copy_(tensor, /*non_blocking=*/true));
    if (!done_) done_.emplace(tensor.device().type());
    done_->record(current_stream(tensor.device()));
  }
}

const std::vector<at::Tensor>& Download::wait() {
  if (done_) done_->synchronize();
  return copies_;
}

}  // namespace heddle::device
