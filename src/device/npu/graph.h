#pragma once

#include "device/graph.h"

namespace heddle::device::npu {

/// By NPUGraph, on a stream of its own. `neighbour`: its memory is not shared.
std::unique_ptr<Graph> record(int index, const std::function<void()>& work, const Graph* neighbour);

}  // namespace heddle::device::npu
