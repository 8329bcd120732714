#pragma once

#include <cstdlib>

#include "device/device.h"
#include "device/sim/simulation.h"
#include "testing/device_name.h"

namespace heddle::testing {

/// The simulated NPU, started. With float64, so that equality can be proven.
inline c10::Device simulated_npu() {
  setenv(device::sim::kVariable, "1", /*overwrite=*/1);
  if (!device::sim::is_running()) device::sim::start({.allow_float64 = true});
  const c10::Device npu = device::parse("npu:0");
  device::start(npu);
  return npu;
}

/// The device of --device, started.
inline c10::Device device() {
  return device_name() == "cpu" ? c10::Device(c10::DeviceType::CPU) : simulated_npu();
}

}  // namespace heddle::testing
