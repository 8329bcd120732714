#include "sync/checksum.h"
#include "base/errors.h"

namespace heddle::sync {

at::Tensor cuda_checksum(const at::Tensor&, std::uint64_t) {
  throw_error<DeviceError>(
      "checksum of a CUDA device's memory: this build has no CUDA; rebuild with: cmake --preset "
      "cuda");
}

}  // namespace heddle::sync
