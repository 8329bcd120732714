// The checksum of a bucket: plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace heddle::sync::cuda {

/// Adds to `*sum` the mixed words [0, count) of `words`, which begin at a multiple of 16 bytes.
void add_checksum(const std::uint64_t* words, std::int64_t count, std::uint64_t* sum,
                  cudaStream_t stream);

}  // namespace heddle::sync::cuda
