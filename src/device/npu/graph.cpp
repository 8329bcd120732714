#include "device/npu/graph.h"

#include <torch_npu/csrc/core/npu/NPUEvent.h>
#include <torch_npu/csrc/core/npu/NPUGraph.h>
#include <torch_npu/csrc/core/npu/NPUGuard.h>

#include "device/npu/translated.h"

namespace heddle::device::npu {
namespace {

class RecordedGraph final : public Graph {
 public:
  RecordedGraph(c10::DeviceIndex index, const std::function<void()>& work) {
    const c10_npu::NPUGuard device(index);
    const c10_npu::NPUStream stream = c10_npu::getNPUStreamFromPool(index);
    wait(stream, c10_npu::getCurrentNPUStream(index));
    const c10_npu::NPUStreamGuard guard(stream.unwrap());
    // Calls of other threads, HCCL's watchdog among them, do not spoil the capture.
    graph_.capture_begin({0, 0}, ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL);
    try {
      work();
    } catch (...) {
      end_quietly();
      throw;
    }
    graph_.capture_end();
  }
  void replay() override {
    translated("replay a graph", [&] { graph_.replay(); });
  }

 private:
  static void wait(const c10_npu::NPUStream& later, const c10_npu::NPUStream& earlier) {
    c10_npu::NPUEvent event;
    event.record(earlier);
    event.block(later);
  }
  /// After an error of the work itself, which is the one to report.
  void end_quietly() noexcept {
    try {
      graph_.capture_end();
      graph_.reset();
    } catch (const std::exception&) {
    }
  }

  c10_npu::NPUGraph graph_;
};

}  // namespace

std::unique_ptr<Graph> record(int index, const std::function<void()>& work,
                              const Graph* /*neighbour*/) {
  return translated("record a graph", [&] {
    return std::make_unique<RecordedGraph>(static_cast<c10::DeviceIndex>(index), work);
  });
}

}  // namespace heddle::device::npu
