#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

namespace heddle::ops {

/// A kind of device that kernels are written for. An NPU and its simulation are one type of device
/// for libtorch and two platforms here.
enum class Platform {
  kCpu,
  kCuda,
  kAscend,
  kSim,     ///< The simulated NPU.
  kShapes,  ///< Tensors that have shapes alone: nothing runs.
};

/// "cpu", "cuda", "ascend", "sim", "shapes".
const char* to_string(Platform platform);

/// The purpose that a model runs an operator for.
enum class Use {
  kTraining,    ///< Forward and backward.
  kGeneration,  ///< Forward alone: scoring and generation.
};

/// The device that a table of kernels is chosen for.
struct Target {
  Platform platform = Platform::kCpu;
  std::string chip = {};           ///< "Ascend910B3", "NVIDIA H200"; empty: unknown.
  std::int64_t on_chip_bytes = 0;  ///< Memory that one block of work may use; 0: no limit.
};

/// A device that has been started, with its chip and the limits of that.
Target target_of(c10::Device device);

}  // namespace heddle::ops
