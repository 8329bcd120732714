#include "ops/target.h"

#include "base/errors.h"
#include "device/device.h"

namespace heddle::ops {
namespace {

Platform platform_of(c10::Device device) {
  switch (device.type()) {
    case c10::DeviceType::CPU:
      return Platform::kCpu;
    case c10::DeviceType::CUDA:
      return Platform::kCuda;
    case c10::DeviceType::PrivateUse1:
      return device::is_simulated(device) ? Platform::kSim : Platform::kAscend;
    case c10::DeviceType::Meta:
      return Platform::kShapes;
    default:
      throw_error<InternalError>("no kernels are written for device {}", device.str());
  }
}

}  // namespace

const char* to_string(Platform platform) {
  switch (platform) {
    case Platform::kCpu:
      return "cpu";
    case Platform::kCuda:
      return "cuda";
    case Platform::kAscend:
      return "ascend";
    case Platform::kSim:
      return "sim";
    case Platform::kShapes:
      return "shapes";
  }
  return "";
}

Target target_of(c10::Device device) {
  const Platform platform = platform_of(device);
  if (platform == Platform::kCpu || platform == Platform::kShapes) return {platform};
  const device::Properties properties = device::properties(device);
  return {platform, properties.name, properties.on_chip_bytes};
}

}  // namespace heddle::ops
