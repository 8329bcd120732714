#include "device/copy_stream.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace heddle::device {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

at::Tensor host_like(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype()).pinned_memory(true));
}

struct CopyStream::Copy::State {
  at::Tensor to, from;
  c10::Device device;
  c10::Event done;
};

CopyStream::CopyStream(c10::Device device)
    : stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

CopyStream::Copy CopyStream::begin(const at::Tensor& to, const at::Tensor& from) {
  const c10::Device device = stream_.device();
  c10::Event ready(device.type());
  ready.record(current_stream(device));
  ready.block(stream_);
  Copy copy;
  copy.state_ =
      std::make_shared<Copy::State>(Copy::State{to, from, device, c10::Event(device.type())});
  const c10::StreamGuard guard(stream_);
  copy.state_->to.copy_(from, /*non_blocking=*/true);
  copy.state_->done.record(stream_);
  return copy;
}

void CopyStream::Copy::wait() {
  if (!state_) return;
  state_->done.block(current_stream(state_->device));
  state_.reset();
}

}  // namespace heddle::device
