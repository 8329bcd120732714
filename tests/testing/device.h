#pragma once

#include <cstdlib>

#include "device/device.h"
#include "testing/device_name.h"

namespace heddle::testing {

/// The simulated NPU, started. With float64, so that equality can be proven.
inline c10::Device simulated_npu() {
  setenv("HEDDLE_SIM_NPU", "float64", /*overwrite=*/1);
  const c10::Device npu = device::parse("npu:0");
  device::start(npu);
  return npu;
}

/// The device of --device, started: "cpu", "cuda", or the simulated "npu".
inline c10::Device device() {
  if (device_name() == "npu") return simulated_npu();
  const c10::Device device = device::parse(device_name());
  device::start(device);
  return device;
}

}  // namespace heddle::testing
