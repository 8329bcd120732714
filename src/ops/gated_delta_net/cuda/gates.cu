// A thread keeps one head (forward: two where they can be read at once) and walks over tokens, so
// that the head's parameters and the sums of their gradients stay in registers; a CTA holds as many
// tokens side by side as its threads allow.
#include "ops/gated_delta_net/cuda/gates.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/cuda/column_sum.h"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 256;

struct Arguments {
  int64_t tokens;
  uint32_t heads;
  Element a_log_type, dt_bias_type;
  InputRows a, b;
  const void *a_log, *dt_bias;
  float *g, *beta;
  const float *grad_g, *grad_beta;
  void *grad_a, *grad_b;
  float *partial_a_log, *partial_dt_bias;
};

__device__ __forceinline__ float parameter(const void* data, Element type, uint32_t head) {
  float value[1];
  read_weight(data, type, head, value);
  return value[0];
}

template <class T>
__device__ __forceinline__ float element(const InputRows& rows, int64_t token, uint32_t head) {
  float value[1];
  read(static_cast<const T*>(rows.data) + token * rows.outer_stride + head, value);
  return value[0];
}

/// log(1 + e^x); from 20 on the two sides agree to fp32.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

/// N heads a thread.
template <class T, int N>
__global__ void forward_kernel(const __grid_constant__ Arguments p) {
  const uint32_t threads = p.heads / N, head = threadIdx.x % threads * N,
                 side = threadIdx.x / threads, sides = blockDim.x / threads;
  if (side >= sides) return;
  float rate[N], bias[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    rate[n] = -expf(parameter(p.a_log, p.a_log_type, head + n));
    bias[n] = parameter(p.dt_bias, p.dt_bias_type, head + n);
  }
  const int64_t step = static_cast<int64_t>(gridDim.x) * sides;
#pragma unroll 4
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * sides + side; t < p.tokens; t += step) {
    float a[N], b[N];
    read(static_cast<const T*>(p.a.data) + t * p.a.outer_stride + head, a);
    read(static_cast<const T*>(p.b.data) + t * p.b.outer_stride + head, b);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      a[n] = rate[n] * softplus(a[n] + bias[n]);
      b[n] = sigmoid(b[n]);
    }
    write(p.g + t * p.heads + head, a);
    write(p.beta + t * p.heads + head, b);
  }
}

template <class T>
__global__ void backward_kernel(const __grid_constant__ Arguments p) {
  __shared__ float lines[2][kGdnGatesMostHeads];
  const uint32_t head = threadIdx.x % p.heads, side = threadIdx.x / p.heads;
  const uint32_t sides = blockDim.x / p.heads;
  float d_a_log = 0, d_dt_bias = 0;
  if (side < sides) {
    const float rate = -expf(parameter(p.a_log, p.a_log_type, head));
    const float bias = parameter(p.dt_bias, p.dt_bias_type, head);
    const int64_t step = static_cast<int64_t>(gridDim.x) * sides;
#pragma unroll 4
    for (int64_t t = static_cast<int64_t>(blockIdx.x) * sides + side; t < p.tokens; t += step) {
      const int64_t at = t * p.heads + head;
      if (p.grad_g != nullptr) {
        const float dg = p.grad_g[at];
        const float da[1] = {rate * sigmoid(element<T>(p.a, t, head) + bias) * dg};
        d_a_log += dg * p.g[at];
        d_dt_bias += da[0];
        write(static_cast<T*>(p.grad_a) + at, da);
      }
      if (p.grad_beta != nullptr) {
        const float beta = p.beta[at];
        const float db[1] = {p.grad_beta[at] * beta * (1.f - beta)};
        write(static_cast<T*>(p.grad_b) + at, db);
      }
    }
  }
  if (p.grad_g == nullptr || p.partial_a_log == nullptr) return;
  // A thread per head and side of the CTA: kThreads or heads of them, at most kGdnGatesMostHeads.
  lines[0][threadIdx.x] = d_a_log;
  lines[1][threadIdx.x] = d_dt_bias;
  __syncthreads();
  if (threadIdx.x >= p.heads) return;
  float a_log = 0, dt_bias = 0;
  for (uint32_t s = 0; s < sides; ++s) {
    a_log += lines[0][s * p.heads + threadIdx.x];
    dt_bias += lines[1][s * p.heads + threadIdx.x];
  }
  p.partial_a_log[blockIdx.x * p.heads + threadIdx.x] = a_log;
  p.partial_dt_bias[blockIdx.x * p.heads + threadIdx.x] = dt_bias;
}

int threads_of(const GdnGatesShape& shape) {
  if (shape.heads > kGdnGatesMostHeads) {
    throw std::invalid_argument("gdn_gates: " + std::to_string(shape.heads) +
                                " heads, the CUDA kernel takes " +
                                std::to_string(kGdnGatesMostHeads));
  }
  return static_cast<int>(std::max<int64_t>(kThreads, shape.heads));
}

/// `sides`: tokens that a CTA takes at once. Each thread four tokens or more.
unsigned blocks_of(const GdnGatesShape& shape, int64_t sides) {
  return static_cast<unsigned>(
      std::clamp<int64_t>(shape.tokens / (4 * sides), 1, multiprocessors() * int64_t{8}));
}

int64_t backward_blocks(const GdnGatesShape& shape) {
  return blocks_of(shape, threads_of(shape) / shape.heads);
}

}  // namespace

void gdn_gates_forward(const GdnGatesShape& shape, const InputRows& a, const InputRows& b,
                       const void* a_log, const void* dt_bias, float* g, float* beta,
                       cudaStream_t stream) {
  if (shape.tokens == 0 || shape.heads == 0) return;
  Arguments p{};
  p.tokens = shape.tokens;
  p.heads = static_cast<uint32_t>(shape.heads);
  p.a_log_type = shape.a_log_type;
  p.dt_bias_type = shape.dt_bias_type;
  p.a = a;
  p.b = b;
  p.a_log = a_log;
  p.dt_bias = dt_bias;
  p.g = g;
  p.beta = beta;
  constexpr int kBytes = 4;  // two heads of bf16
  const auto in_pairs = [](const float* out) { return reinterpret_cast<uintptr_t>(out) % 8 == 0; };
  const bool wide = aligned(a, shape.type, shape.heads, kBytes) &&
                    aligned(b, shape.type, shape.heads, kBytes) && in_pairs(g) && in_pairs(beta);
  dispatch_access<kBytes>(shape.type, wide, [&](auto access) {
    using T = typename decltype(access)::Type;
    constexpr int N = decltype(access)::kWidth;
    const int64_t sides = threads_of(shape) / (shape.heads / N);
    forward_kernel<T, N><<<blocks_of(shape, sides), threads_of(shape), 0, stream>>>(p);
  });
  check_launch("gdn_gates_forward");
}

int64_t gdn_gates_backward_workspace(const GdnGatesShape& shape) {
  return shape.heads == 0 ? 0 : 2 * backward_blocks(shape) * shape.heads;
}

void gdn_gates_backward(const GdnGatesShape& shape, const InputRows& a, const void* a_log,
                        const void* dt_bias, const float* g, const float* beta, const float* grad_g,
                        const float* grad_beta, void* grad_a, void* grad_b, void* grad_a_log,
                        void* grad_dt_bias, float* workspace, cudaStream_t stream) {
  if (shape.heads == 0) return;
  // No tokens, no rows of partial sums: the sums are zero.
  const int64_t blocks = shape.tokens == 0 ? 0 : backward_blocks(shape);
  Arguments p{};
  p.tokens = shape.tokens;
  p.heads = static_cast<uint32_t>(shape.heads);
  p.a_log_type = shape.a_log_type;
  p.dt_bias_type = shape.dt_bias_type;
  p.a = a;
  p.a_log = a_log;
  p.dt_bias = dt_bias;
  p.g = const_cast<float*>(g);
  p.beta = const_cast<float*>(beta);
  p.grad_g = grad_g;
  p.grad_beta = grad_beta;
  p.grad_a = grad_a;
  p.grad_b = grad_b;
  if (grad_a_log != nullptr) {
    p.partial_a_log = workspace;
    p.partial_dt_bias = workspace + blocks * shape.heads;
  }
  if (blocks > 0) {
    dispatch_access(shape.type, false, [&](auto access) {
      using T = typename decltype(access)::Type;
      backward_kernel<T><<<static_cast<unsigned>(blocks), threads_of(shape), 0, stream>>>(p);
    });
    check_launch("gdn_gates_backward");
  }
  if (grad_a_log == nullptr) return;
  column_sum(p.partial_a_log, blocks, shape.heads, grad_a_log, shape.a_log_type, stream);
  column_sum(p.partial_dt_bias, blocks, shape.heads, grad_dt_bias, shape.dt_bias_type, stream);
}

}  // namespace heddle::ops::cuda
