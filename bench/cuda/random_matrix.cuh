// Parts that the programs of this folder share.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <stdexcept>

namespace heddle::bench_cuda {

inline void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// Numbers from -scale to scale that follow from place and seed.
static __global__ void fill(__nv_bfloat16* data, int64_t count, unsigned seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    unsigned h = static_cast<unsigned>(i) * 2654435761u + seed;
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
    data[i] = __float2bfloat16((static_cast<float>(h & 0xffff) / 32768.f - 1.f) * scale);
  }
}

}  // namespace heddle::bench_cuda
