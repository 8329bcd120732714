#pragma once

#include "device/graph.h"

namespace heddle::device::npu {

/// By NPUGraph, on a stream of its own.
std::unique_ptr<Graph> record(int index, const std::function<void()>& work);

}  // namespace heddle::device::npu
