// A warp has a row in registers between its largest magnitude and its 8-bit values.
#include "ops/moe/cuda/expert_rows_fp8.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "ops/cuda/fp8.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 256, kWidth = 8, kWarps = kThreads / 32;

/// Values v of a warp's row, 8 a lane at column (i * 32 + lane) * 8, and the row's scale.
template <int kHeld>
__device__ __forceinline__ void write_row(const float (&v)[kHeld][kWidth], uint8_t* row, int width,
                                          float scale) {
  const int lane = threadIdx.x % 32;
  const float inverse = 1.f / scale;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int column = (i * 32 + lane) * kWidth;
    if (column < width) *reinterpret_cast<uint2*>(row + column) = fp8_of(v[i], inverse);
  }
}

template <int kHeld>
__device__ __forceinline__ float row_largest(const float (&v)[kHeld][kWidth], float largest) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) largest = fmaxf(largest, fabsf(v[i][e]));
  }
  return largest;
}

template <int kHeld>
__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(int64_t count, int width, const bf16* gate_up, const bf16* weights,
                  const int64_t* source, const Fp8Rows hidden) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= count) return;
  const float weight = __bfloat162float(weights[source[row]]);
  const bf16* const from = gate_up + row * 2 * width;
  float h[kHeld][kWidth];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int column = (i * 32 + lane) * kWidth;
    float g[kWidth] = {};
#pragma unroll
    for (int e = 0; e < kWidth; ++e) h[i][e] = 0.f;
    if (column < width) {
      const auto gates = load<kWidth>(from + column), ups = load<kWidth>(from + width + column);
      unpack<kWidth, bf16>(gates, g);
      unpack<kWidth, bf16>(ups, h[i]);
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) h[i][e] *= weight * g[e] * sigmoid(g[e]);
  }
  const float scale = fp8_scale(warp_largest(row_largest(h, 0.f)));
  if (lane == 0) hidden.scales[row] = scale;
  write_row(h, static_cast<uint8_t*>(hidden.values) + row * width, width, scale);
}

template <int kHeld>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(int64_t count, int width, const bf16* gate_up, const bf16* grad_hidden,
                           const bf16* weights, const int64_t* source, const Fp8Rows grad_gate_up,
                           bf16* grad_weights) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= count) return;
  const int64_t assignment = source[row];
  const float weight = __bfloat162float(weights[assignment]);
  const bf16* const from = gate_up + row * 2 * width;
  float gates[kHeld][kWidth], ups[kHeld][kWidth];  // first the values, then their gradients
  float sum = 0;                                   // of grad_hidden * silu(gate) * up
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int column = (i * 32 + lane) * kWidth;
    float d[kWidth] = {};
#pragma unroll
    for (int e = 0; e < kWidth; ++e) gates[i][e] = ups[i][e] = 0.f;
    if (column < width) {
      const auto g = load<kWidth>(from + column), u = load<kWidth>(from + width + column),
                 grad = load<kWidth>(grad_hidden + row * width + column);
      unpack<kWidth, bf16>(g, gates[i]);
      unpack<kWidth, bf16>(u, ups[i]);
      unpack<kWidth, bf16>(grad, d);
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float g = gates[i][e], u = ups[i][e], s = sigmoid(g), silu = g * s;
      sum += d[e] * silu * u;
      const float grad = weight * d[e];
      ups[i][e] = grad * silu;
      gates[i][e] = grad * u * s * (1.f + g * (1.f - s));
    }
  }
  const float scale = fp8_scale(warp_largest(row_largest(ups, row_largest(gates, 0.f))));
  sum = lane_sum(sum);
  if (lane == 0) {
    grad_gate_up.scales[row] = scale;
    grad_weights[assignment] = __float2bfloat16_rn(sum);
  }
  uint8_t* const to = static_cast<uint8_t*>(grad_gate_up.values) + row * 2 * width;
  write_row(gates, to, width, scale);
  write_row(ups, to + width, width, scale);
}

constexpr int kPieces = 64;  // accesses of a thread

/// Magnitudes are not negative: they are ordered as their bits are, whatever the order of CTAs.
__global__ void __launch_bounds__(kThreads)
    largest_kernel(int64_t size, const bf16* x, unsigned* largest) {
  __shared__ float scratch[32];
  const bf16* const matrix = x + blockIdx.y * size;
  float most = 0.f;
  const int64_t first = (int64_t{blockIdx.x} * kPieces * kThreads + threadIdx.x) * kWidth;
#pragma unroll 4
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = first + int64_t{i} * kThreads * kWidth;
    if (at < size) most = fmaxf(most, largest_of(load<kWidth>(matrix + at)));
  }
  most = block_largest(most, scratch);
  if (threadIdx.x == 0) atomicMax(&largest[blockIdx.y], __float_as_uint(most));
}

__global__ void scale_kernel(int matrices, float* scales) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < matrices) scales[i] = fp8_scale(scales[i]);
}

__global__ void __launch_bounds__(kThreads)
    convert_kernel(int64_t size, const bf16* x, const float* scales, uint8_t* y) {
  const int64_t matrix = blockIdx.y * size;
  const float inverse = 1.f / scales[blockIdx.y];
  const int64_t first = (int64_t{blockIdx.x} * kPieces * kThreads + threadIdx.x) * kWidth;
#pragma unroll 4
  for (int i = 0; i < kPieces; ++i) {
    const int64_t at = first + int64_t{i} * kThreads * kWidth;
    if (at >= size) continue;
    float v[kWidth];
    unpack<kWidth, bf16>(load<kWidth>(x + matrix + at), v);
    *reinterpret_cast<uint2*>(y + matrix + at) = fp8_of(v, inverse);
  }
}

/// Calls f with the accesses that a lane has of a row.
template <class F>
void dispatch(int64_t count, int64_t width, const F& f) {
  if (width > kLongestExpertRow || width % kWidth != 0)
    throw std::invalid_argument("experts in 8 bits: rows of " + std::to_string(width) +
                                " elements, the CUDA kernel takes multiples of 8 up to " +
                                std::to_string(kLongestExpertRow));
  const auto blocks = static_cast<unsigned>((count + kWarps - 1) / kWarps);
  using std::integral_constant;
  if (width <= 256) return f(integral_constant<int, 1>(), blocks);
  if (width <= 512) return f(integral_constant<int, 2>(), blocks);
  if (width <= 1024) return f(integral_constant<int, 4>(), blocks);
  return f(integral_constant<int, 8>(), blocks);
}

}  // namespace

void weighted_swiglu_forward_fp8(int64_t count, int64_t width, const void* gate_up,
                                 const void* weights, const int64_t* source, const Fp8Rows& hidden,
                                 cudaStream_t stream) {
  if (count == 0) return;
  dispatch(count, width, [&](auto held, unsigned blocks) {
    swiglu_kernel<held.value><<<blocks, kThreads, 0, stream>>>(
        count, static_cast<int>(width), static_cast<const bf16*>(gate_up),
        static_cast<const bf16*>(weights), source, hidden);
  });
  check_launch("weighted_swiglu_forward_fp8");
}

void weighted_swiglu_backward_fp8(int64_t count, int64_t width, const void* gate_up,
                                  const void* grad_hidden, const void* weights,
                                  const int64_t* source, const Fp8Rows& grad_gate_up,
                                  void* grad_weights, cudaStream_t stream) {
  if (count == 0) return;
  dispatch(count, width, [&](auto held, unsigned blocks) {
    swiglu_backward_kernel<held.value><<<blocks, kThreads, 0, stream>>>(
        count, static_cast<int>(width), static_cast<const bf16*>(gate_up),
        static_cast<const bf16*>(grad_hidden), static_cast<const bf16*>(weights), source,
        grad_gate_up, static_cast<bf16*>(grad_weights));
  });
  check_launch("weighted_swiglu_backward_fp8");
}

void fp8_matrices(int64_t matrices, int64_t size, const void* x, void* y, float* scales,
                  cudaStream_t stream) {
  if (matrices == 0 || size == 0) return;
  if (size % kWidth != 0 || matrices > 65535)
    throw std::invalid_argument("fp8_matrices (cuda): " + std::to_string(matrices) +
                                " matrices of " + std::to_string(size) + " elements");
  const int64_t each = int64_t{kPieces} * kThreads * kWidth;
  const dim3 grid(static_cast<unsigned>((size + each - 1) / each), static_cast<unsigned>(matrices));
  cudaMemsetAsync(scales, 0, sizeof(float) * static_cast<std::size_t>(matrices), stream);
  const auto from = static_cast<const bf16*>(x);
  largest_kernel<<<grid, kThreads, 0, stream>>>(size, from, reinterpret_cast<unsigned*>(scales));
  scale_kernel<<<static_cast<unsigned>((matrices + 255) / 256), 256, 0, stream>>>(
      static_cast<int>(matrices), scales);
  convert_kernel<<<grid, kThreads, 0, stream>>>(size, from, scales, static_cast<uint8_t*>(y));
  check_launch("fp8_matrices");
}

}  // namespace heddle::ops::cuda
