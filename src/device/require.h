#pragma once

#include <cstdint>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

/// Conditions that must hold before a layer above relies on a device.
namespace heddle::device {

/// Throws DeviceError that names `what` ("a model") if the device's platform must be started and is
/// not: it starts before a model is built.
void require_started(c10::Device device, const char* what);

/// Throws ConfigError that names the key and the device if the started device has no arithmetic of
/// that dtype.
void require_dtype(c10::Device device, c10::ScalarType dtype, const char* key);

/// Throws DeviceError with both byte counts if a tile of `what` ("causal_conv1d") is larger than
/// what one core of the device has.
void require_on_chip(c10::Device device, const char* what, std::int64_t bytes);

}  // namespace heddle::device
