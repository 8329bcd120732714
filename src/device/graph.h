#pragma once

#include <functional>
#include <memory>

#include <c10/core/Device.h>

namespace heddle::device {

/// Work of a device that was recorded once and is started again as a whole, with the same memory.
class Graph {
 public:
  virtual ~Graph() = default;
  /// Queues it on the current stream.
  virtual void replay() = 0;
};

/// Records what `work` queues on the device, which is not run. It may not wait for the device,
/// and what its shapes depend on must be the same in every replay. `neighbour`, which may be null,
/// is a graph whose memory this one may use too: what a replay of either leaves there, the next one
/// of the other overwrites, but for tensors that `work` keeps. Throws DeviceError where the device
/// cannot record.
std::unique_ptr<Graph> record(c10::Device device, const std::function<void()>& work,
                              const Graph* neighbour = nullptr);

}  // namespace heddle::device
