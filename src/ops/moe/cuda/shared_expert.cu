// A warp has a row: its gate is read once, and the gradient of the gate is a sum over the warp.
#include "ops/moe/cuda/shared_expert.h"

#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kWidth = 8;  // elements of an access
constexpr int kSteps = 4;  // accesses of each tensor in flight

__global__ void __launch_bounds__(kThreads)
    forward_kernel(int64_t tokens, int64_t width, const bf16* routed, const bf16* shared,
                   const bf16* gate, int64_t gate_stride, const bf16* residual, bf16* y) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= tokens) return;
  const float weight = sigmoid(__bfloat162float(gate[row * gate_stride]));
  const int64_t end = (row + 1) * width;
#pragma unroll kSteps
  for (int64_t at = row * width + threadIdx.x % 32 * kWidth; at < end; at += 32 * kWidth) {
    float sum[kWidth], x[kWidth];
    read(routed + at, sum);
    read(shared + at, x);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sum[e] += weight * x[e];
    if (residual != nullptr) {
      read(residual + at, x);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e] += x[e];
    }
    write(y + at, sum);
  }
}

__global__ void __launch_bounds__(kThreads)
    backward_kernel(int64_t tokens, int64_t width, const bf16* shared, const bf16* gate,
                    int64_t gate_stride, const bf16* grad_y, bf16* grad_shared, bf16* grad_gate,
                    int64_t grad_gate_stride) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= tokens) return;
  const float weight = sigmoid(__bfloat162float(gate[row * gate_stride]));
  const int64_t end = (row + 1) * width;
  float sum = 0;  // of grad_y * shared
#pragma unroll kSteps
  for (int64_t at = row * width + threadIdx.x % 32 * kWidth; at < end; at += 32 * kWidth) {
    float dy[kWidth], x[kWidth];
    read(grad_y + at, dy);
    read(shared + at, x);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      sum += dy[e] * x[e];
      dy[e] *= weight;
    }
    write(grad_shared + at, dy);
  }
  sum = lane_sum(sum);
  if (threadIdx.x % 32 == 0)
    grad_gate[row * grad_gate_stride] = __float2bfloat16_rn(sum * weight * (1.f - weight));
}

unsigned blocks_of(int64_t tokens) { return static_cast<unsigned>((tokens + kWarps - 1) / kWarps); }

}  // namespace

void shared_expert_forward(int64_t tokens, int64_t width, const void* routed, const void* shared,
                           const void* gate, int64_t gate_stride, const void* residual, void* y,
                           cudaStream_t stream) {
  if (tokens == 0) return;
  forward_kernel<<<blocks_of(tokens), kThreads, 0, stream>>>(
      tokens, width, static_cast<const bf16*>(routed), static_cast<const bf16*>(shared),
      static_cast<const bf16*>(gate), gate_stride, static_cast<const bf16*>(residual),
      static_cast<bf16*>(y));
  check_launch("shared_expert_forward");
}

void shared_expert_backward(int64_t tokens, int64_t width, const void* shared, const void* gate,
                            int64_t gate_stride, const void* grad_y, void* grad_shared,
                            void* grad_gate, int64_t grad_gate_stride, cudaStream_t stream) {
  if (tokens == 0) return;
  backward_kernel<<<blocks_of(tokens), kThreads, 0, stream>>>(
      tokens, width, static_cast<const bf16*>(shared), static_cast<const bf16*>(gate), gate_stride,
      static_cast<const bf16*>(grad_y), static_cast<bf16*>(grad_shared),
      static_cast<bf16*>(grad_gate), grad_gate_stride);
  check_launch("shared_expert_backward");
}

}  // namespace heddle::ops::cuda
