#include "device/cuda/graph.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "base/errors.h"

namespace heddle::device::cuda {
namespace {

class RecordedGraph final : public Graph {
 public:
  RecordedGraph(c10::DeviceIndex index, const std::function<void()>& work,
                const RecordedGraph* neighbour)
      : pool_(neighbour == nullptr ? at::cuda::graph_pool_handle() : neighbour->pool_),
        stream_(neighbour == nullptr ? c10::cuda::getStreamFromPool(false, index)
                                     : neighbour->stream_) {
    const c10::cuda::CUDAGuard device(index);
    at::cuda::CUDAEvent earlier;
    earlier.record(c10::cuda::getCurrentCUDAStream(index));
    earlier.block(stream_);
    // The graph takes memory of its own, as much as the same work took from what is cached now.
    c10::cuda::CUDACachingAllocator::emptyCache();
    const c10::cuda::CUDAStreamGuard guard(stream_);
    // Calls of other threads do not spoil the capture.
    graph_.capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      end_quietly();
      throw;
    }
    graph_.capture_end();
  }
  void replay() override { graph_.replay(); }

 private:
  /// After an error of the work itself, which is the one to report.
  void end_quietly() noexcept {
    try {
      graph_.capture_end();
    } catch (const std::exception&) {
    }
    try {
      graph_.reset();
    } catch (const std::exception&) {
    }
    cudaGetLastError();  // that of the capture, which is not the next launch's
  }

  c10::MempoolId_t pool_;
  /// All graphs of the pool share it: the allocator gives freed memory to its own stream alone, and
  /// a backward runs on the stream of its forward, which may be another graph.
  c10::cuda::CUDAStream stream_;
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<Graph> record(int index, const std::function<void()>& work,
                              const Graph* neighbour) {
  try {
    return std::make_unique<RecordedGraph>(static_cast<c10::DeviceIndex>(index), work,
                                           static_cast<const RecordedGraph*>(neighbour));
  } catch (const c10::Error& error) {
    throw_error<DeviceError>("record a graph: {}", error.what_without_backtrace());
  }
}

}  // namespace heddle::device::cuda
