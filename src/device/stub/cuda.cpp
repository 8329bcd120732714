#include "device/backend.h"

namespace heddle::device::cuda {

const Backend& backend() {
  static const Backend kNone = {
      .name = "cuda",
      .unavailable =
          [] {
            return std::optional<std::string>(
                "this build has no CUDA back end; install the wheel with +cu130 in its version, or "
                "rebuild with: cmake --preset cuda && cmake --build --preset cuda");
          },
      .list = [] { return std::vector<Accelerator>(); },
      .on_chip_bytes = [](int) { return std::int64_t{0}; },
      .memory = [](int) { return Memory{}; },
      .free_bytes = [](int) { return std::int64_t{0}; },
      .synchronize = [](int) {},
      .start = nullptr,
      .finish = nullptr,
  };
  return kNone;
}

}  // namespace heddle::device::cuda
