// Sums whose order is fixed: no atomics, so the same bits in every run.
#pragma once

namespace heddle::ops::cuda {

/// The sum over groups of kLanes neighbouring lanes, in every lane.
template <int kLanes = 32>
__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

/// The sum over the CTA, in every thread. `scratch` holds 32 floats; the caller alternates between
/// two of them, so that one barrier per sum is enough.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  value = lane_sum(value);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  return lane_sum(lane < warps ? scratch[lane] : 0.f);
}

}  // namespace heddle::ops::cuda
