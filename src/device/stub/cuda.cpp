#include "device/backend.h"

namespace heddle::device::cuda {

std::optional<std::string> unavailable() {
  return "this build has no CUDA back end; rebuild with: cmake --preset cuda && cmake --build "
         "--preset cuda";
}
std::vector<Accelerator> list() { return {}; }
std::int64_t on_chip_bytes(int) { return 0; }

}  // namespace heddle::device::cuda
