#include "device/backend.h"

namespace heddle::device::npu {

const Backend& backend() {
  static const Backend kNone = {
      .name = "npu",
      .unavailable =
          [] {
            return std::optional<std::string>(
                "this build has no Ascend back end; rebuild on a machine with CANN: "
                "HEDDLE_TORCH_NPU_DIR=... cmake --preset npu && cmake --build --preset npu "
                "(docs/ascend.md)");
          },
      .list = [] { return std::vector<Accelerator>(); },
      .on_chip_bytes = [](int) { return std::int64_t{0}; },
      .memory = [](int) { return Memory{}; },
      .synchronize = [](int) {},
      .start = nullptr,
      .finish = nullptr,
  };
  return kNone;
}

}  // namespace heddle::device::npu
