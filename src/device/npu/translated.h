#pragma once

#include <exception>

#include "base/errors.h"
#include "device/npu_error.h"

namespace heddle::device::npu {

/// Runs `call`; what torch_npu or ACL throws becomes a DeviceError that names the operation.
template <class F>
auto translated(const char* operation, F&& call) {
  try {
    return call();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw_error<DeviceError>("{}: {}", operation,
                             explain_npu_error(error.what()).value_or(error.what()));
  }
}

}  // namespace heddle::device::npu
