#include <stdexcept>
#include <string>

#include "ops/cuda/element.h"

namespace heddle::ops::cuda {

void check_launch(const char* what) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    throw std::runtime_error("no CUDA device is current");
  }
  return count;
}

int compute_capability() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

bool has_sm90a() {
#ifdef HEDDLE_CUDA_SM90A
  return compute_capability() == 90;
#else
  return false;
#endif
}

}  // namespace heddle::ops::cuda
