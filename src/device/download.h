#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

namespace heddle::device {

/// Copies of tensors on their way to the host, each by way of pinned memory of its own: what the
/// device is given afterwards may write over the tensors, and the host need not wait for it.
class Download {
 public:
  /// Queues the copies after what the current stream of their device, which is one, has been given
  /// so far. Undefined tensors stay so; those of the host are taken as they are.
  explicit Download(const std::vector<at::Tensor>& tensors);

  /// The copies, in order; waits for them, not for what was queued after them.
  const std::vector<at::Tensor>& wait();

 private:
  std::vector<at::Tensor> copies_;
  std::optional<c10::Event> done_;  ///< None where nothing is on its way.
};

}  // namespace heddle::device
