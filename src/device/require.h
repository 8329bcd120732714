#pragma once

#include <cstdint>

#include <c10/core/Device.h>

/// What must hold before a layer above relies on a device.
namespace heddle::device {

/// Throws DeviceError that names `what` ("a model") if the device's platform must be started and is
/// not: it starts before a model is built.
void require_started(c10::Device device, const char* what);

/// Throws DeviceError with both byte counts if a tile of `what` ("causal_conv1d") is larger than
/// what one core of the device has.
void require_on_chip(c10::Device device, const char* what, std::int64_t bytes);

}  // namespace heddle::device
