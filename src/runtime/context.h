#pragma once

#include <cstdint>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include "comm/mesh.h"

namespace heddle::runtime {

/// One rank: what it runs on and where it stands among the others. Passed down, never global, so
/// that ranks can be threads of one process and a trainer and a rollout engine can share one.
struct Context {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  c10::ScalarType dtype = c10::ScalarType::Float;  ///< Dtype of parameters and activations.
  comm::Mesh mesh = comm::Mesh::single();
  std::uint64_t seed = 0;  ///< Key of every random number (base/rng.h).

  /// At least fp32: statistics, losses, recurrent states.
  c10::ScalarType wide_dtype() const {
    return dtype == c10::ScalarType::Double ? c10::ScalarType::Double : c10::ScalarType::Float;
  }
};

/// "float32" | "bfloat16" | "float64" (also fp32, bf16, fp64). Throws ConfigError naming `key`.
c10::ScalarType parse_dtype(const std::string& text, const char* key);
const char* dtype_name(c10::ScalarType dtype);

}  // namespace heddle::runtime
