#include "comm/device_backend.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/errors.h"

namespace heddle::comm {

Backend make_hccl(const Store&, const DeviceGroupOptions& options) {
  throw_error<CommError>(
      "group {}: this build has no HCCL; rebuild with: cmake --preset npu (docs/ascend.md)",
      options.name);
}

}  // namespace heddle::comm
