#pragma once

#include "device/graph.h"

namespace heddle::device::sim {

/// On a stream of its own, as device/npu does.
std::unique_ptr<Graph> record(int index, const std::function<void()>& work);

}  // namespace heddle::device::sim
