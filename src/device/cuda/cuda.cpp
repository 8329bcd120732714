#include <cuda_runtime_api.h>

#include <fmt/format.h>

#include "base/errors.h"
#include "device/backend.h"

namespace heddle::device::cuda {

std::optional<std::string> unavailable() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    return fmt::format("the CUDA driver reports: {}; is an NVIDIA driver for CUDA 13 installed?",
                       cudaGetErrorString(status));
  }
  if (count == 0) return "the CUDA driver shows no device";
  return std::nullopt;
}

std::vector<Accelerator> list() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return {};
  std::vector<Accelerator> found;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    found.push_back({properties.name, static_cast<std::int64_t>(properties.totalGlobalMem),
                     fmt::format("sm_{}{}", properties.major, properties.minor)});
  }
  return found;
}

std::int64_t on_chip_bytes(int index) {
  int bytes = 0;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index) != cudaSuccess)
    return 0;
  return bytes;
}

}  // namespace heddle::device::cuda
