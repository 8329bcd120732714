#include "ops/optimizer_step/cuda/adamw_rounded.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ops/optimizer_step/cuda/adamw_scalars.cuh"
#include "ops/optimizer_step/cuda/elements.cuh"
#include "ops/optimizer_step/rounding.h"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlockElements = kThreads * kVector * 4;
constexpr int kTensors = 56;  // of one launch: their table is its argument, below 4 KB

struct Launch {
  AdamwRoundedTensor tensors[kTensors];
  int first_block[kTensors + 1];
  int count;
};
static_assert(sizeof(Launch) + sizeof(AdamwScalars) <= 4096, "kernel arguments");

/// A thread's view of its tensor in this step.
struct Place {
  float decay;
  std::uint64_t rounding_key;
};

__device__ void update(const Place& place, const AdamwFloats& s, std::uint64_t index,
                       __nv_bfloat16& p16, float g, __nv_bfloat16& m16, __nv_bfloat16& v16) {
  g *= s.gradient_multiplier;
  float p = __bfloat162float(p16), m = __bfloat162float(m16), v = __bfloat162float(v16);
  p *= place.decay;
  m += (1 - s.beta1) * (g - m);
  v = v * s.beta2 + (1 - s.beta2) * g * g;
  p -= s.step_size * m / (sqrtf(v) * s.inverse_root_correction2 + s.eps);
  const std::uint64_t bits = rounding_bits(place.rounding_key, index);
  p16 = rounded(p, static_cast<std::uint32_t>(bits));
  m16 = rounded(m, static_cast<std::uint32_t>(bits >> 16));
  v16 = rounded(v, static_cast<std::uint32_t>(bits >> 32));
}

__device__ float gradient_at(const AdamwRoundedTensor& t, std::int64_t i) {
  return t.gradient_is_float ? static_cast<const float*>(t.gradient)[i]
                             : __bfloat162float(static_cast<const __nv_bfloat16*>(t.gradient)[i]);
}

/// A block updates kBlockElements elements of one tensor, each thread 8 neighbours at a time in
/// registers; the last elements of a tensor go one by one.
__global__ void __launch_bounds__(kThreads)
    adamw_rounded_kernel(const __grid_constant__ Launch launch,
                         const __grid_constant__ AdamwScalars scalars) {
  const AdamwFloats s(scalars);
  if (s.changes_nothing) return;
  int index = 0;
  while (index + 1 < launch.count && static_cast<int>(blockIdx.x) >= launch.first_block[index + 1])
    ++index;
  const AdamwRoundedTensor& t = launch.tensors[index];
  const Place place{s.decay(t.weight_decay), rounding_key_of_step(t.rounding_key, s.step)};
  auto* p = static_cast<__nv_bfloat16*>(t.parameter);
  auto* m = static_cast<__nv_bfloat16*>(t.exp_avg);
  auto* v = static_cast<__nv_bfloat16*>(t.exp_avg_sq);
  const std::int64_t begin =
      static_cast<std::int64_t>(blockIdx.x - launch.first_block[index]) * kBlockElements;
  const std::int64_t end = min(begin + kBlockElements, t.count);
  const bool is_wide = start_on_16_bytes(p, m, v, t.gradient);
  for (std::int64_t i = begin + threadIdx.x * kVector; i < end; i += kThreads * kVector) {
    if (is_wide && i + kVector <= end) {
      Bf16Vector p8 = *reinterpret_cast<Bf16Vector*>(p + i),
                 m8 = *reinterpret_cast<Bf16Vector*>(m + i),
                 v8 = *reinterpret_cast<Bf16Vector*>(v + i);
      float g[kVector];
      load(t.gradient, t.gradient_is_float, i, g);
#pragma unroll
      for (int j = 0; j < kVector; ++j) update(place, s, i + j, p8.x[j], g[j], m8.x[j], v8.x[j]);
      *reinterpret_cast<Bf16Vector*>(p + i) = p8;
      *reinterpret_cast<Bf16Vector*>(m + i) = m8;
      *reinterpret_cast<Bf16Vector*>(v + i) = v8;
    } else {
      for (std::int64_t j = i; j < min(i + kVector, end); ++j)
        update(place, s, j, p[j], gradient_at(t, j), m[j], v[j]);
    }
  }
}

}  // namespace

void adamw_rounded(const std::vector<AdamwRoundedTensor>& tensors, const AdamwScalars& scalars,
                   cudaStream_t stream) {
  for (std::size_t first = 0; first < tensors.size(); first += kTensors) {
    Launch launch{};
    launch.count = static_cast<int>(std::min<std::size_t>(kTensors, tensors.size() - first));
    for (int i = 0; i < launch.count; ++i) {
      launch.tensors[i] = tensors[first + i];
      const std::int64_t blocks = (launch.tensors[i].count + kBlockElements - 1) / kBlockElements;
      launch.first_block[i + 1] = launch.first_block[i] + static_cast<int>(blocks);
    }
    const int blocks = launch.first_block[launch.count];
    if (blocks > 0) adamw_rounded_kernel<<<blocks, kThreads, 0, stream>>>(launch, scalars);
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("adamw_rounded: ") + cudaGetErrorString(error));
}

}  // namespace heddle::ops::cuda
