#pragma once

#include <string>
#include <vector>

#include "device/device.h"

/// What a vendor's back end provides. device/cuda/ defines these in a CUDA build; device/stub/ in
/// any other.
namespace heddle::device::cuda {

/// Why no CUDA device can be used, or nothing if one can.
std::optional<std::string> unavailable();
std::vector<Accelerator> list();
/// Shared memory that one block may use.
std::int64_t on_chip_bytes(int index);

}  // namespace heddle::device::cuda
