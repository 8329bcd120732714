// Memory in which the CTAs of a launch hand over lows (batch_row_changes.cuh): plain C++, no ATen.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace heddle::ops::cuda::batch_row {

/// Words of 64 bits that launches write one after another, each with the number of its round.
struct Exchange {
  uint64_t* words = nullptr;
  uint32_t* counter = nullptr;  ///< [2]: rounds that are over; CTAs through with the one under way.
};

/// The exchange of the stream, or of the recording that it is part of, with `words` at least.
/// Launches that run at the same time have others, unless a process has more than 1024 recordings.
Exchange exchange_of(cudaStream_t stream, int64_t words);

}  // namespace heddle::ops::cuda::batch_row
