#pragma once

#include "device/graph.h"

namespace heddle::device::cuda {

/// By CUDAGraph, on a stream of its own.
std::unique_ptr<Graph> record(int index, const std::function<void()>& work, const Graph* neighbour);

}  // namespace heddle::device::cuda
