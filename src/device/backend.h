#pragma once

#include <optional>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/graph.h"

/// Functions that a vendor's back end provides. A build that has it links device/<vendor>/; any
/// other links device/stub/, which says what to rebuild with. device.cpp is the only caller.
namespace heddle::device {

struct Backend {
  const char* name;  ///< As the configuration writes the device: "cuda", "npu".
  /// Why no such device can be used, or nothing if one can.
  std::optional<std::string> (*unavailable)();
  std::vector<Accelerator> (*list)();
  /// On-chip memory that one block of work may use.
  std::int64_t (*on_chip_bytes)(int index);
  /// Held by tensors of the device; total_bytes need not be set.
  Memory (*memory)(int index);
  /// See device.h.
  std::int64_t (*free_bytes)(int index);
  void (*synchronize)(int index);
  /// Before the first tensor of the device; makes it the current one of the thread.
  void (*start)(int index);
  /// After the last tensor and group, whether started or not; null where there is nothing to end.
  void (*finish)();
  /// Describes the platform of an available device; null where there is nothing to say.
  Platform (*platform)() = nullptr;
  /// See graph.h; null where the device cannot record.
  std::unique_ptr<Graph> (*record)(int index, const std::function<void()>& work,
                                   const Graph* neighbour) = nullptr;
  /// See require.h; null where there is nothing to refuse.
  void (*require_started)(const char* what) = nullptr;
  void (*require_on_chip)(const char* what, std::int64_t bytes) = nullptr;
  bool (*has_float64)() = nullptr;  ///< Whether the started platform has float64; null: it has.
  bool is_simulated = false;        ///< It runs in the memory of the host.
};

namespace cuda {
const Backend& backend();
}  // namespace cuda

namespace npu {
const Backend& backend();
}  // namespace npu

}  // namespace heddle::device
