#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace heddle::device {

/// The stream on which this thread's work for the device, which is not the CPU, is queued.
c10::Stream current_stream(c10::Device device);

/// An empty tensor like this one in pinned memory of the host, where copies do not hold up the
/// host.
at::Tensor host_like(const at::Tensor& tensor);

/// Copies between a device and pinned memory of the host, one after the other, beside what the
/// device computes.
class CopyStream {
 public:
  /// Any device but the CPU.
  explicit CopyStream(c10::Device device);

  /// A copy under way; keeps both tensors.
  class Copy {
   public:
    Copy() = default;
    /// Orders later work of the current stream after the copy. The host does not wait.
    /// Lets go of the tensors. Nothing to do a second time.
    void wait();

   private:
    friend class CopyStream;
    struct State;
    std::shared_ptr<State> state_;
  };

  /// Queues to.copy_(from), which comes after all that the current stream has been given so far.
  Copy begin(const at::Tensor& to, const at::Tensor& from);

 private:
  c10::Stream stream_;
};

}  // namespace heddle::device
