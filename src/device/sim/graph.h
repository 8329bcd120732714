#pragma once

#include "device/graph.h"

namespace heddle::device::sim {

/// On a stream of its own, as device/npu does.
/// `neighbour`: its memory is not shared.
std::unique_ptr<Graph> record(int index, const std::function<void()>& work, const Graph* neighbour);

}  // namespace heddle::device::sim
