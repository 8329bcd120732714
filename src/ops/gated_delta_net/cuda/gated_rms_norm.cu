// A group of lanes holds one row of one head in registers (16 lanes at 128 bf16 elements); CTAs are
// persistent, warps independent of one another. The backward keeps the weight's gradient in
// registers over all rows of a thread and leaves one row of partial sums per CTA.
#include "ops/gated_delta_net/cuda/gated_rms_norm.h"

#include "ops/cuda/column_sum.h"
#include "ops/cuda/lanes.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = kLaneRowThreads;
constexpr int kBackwardBlocks = 4;  // of a multiprocessor at once

struct Arguments {
  uint32_t rows, heads, width, vectors;
  Element weight_type;
  float eps;
  InputRows x, z, grad_y;
  const void* weight;
  void *y, *grad_x, *grad_z;
  float* rstd;
  float* partial;
};

template <class T, int N, int kLanes, int kVectors>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ Arguments a) {
  constexpr uint32_t kGroups = kThreads / kLanes;
  const uint32_t lane = threadIdx.x % kLanes;
  float w[kVectors][N];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t vector = v * kLanes + lane;
    if (vector < a.vectors) read_weight(a.weight, a.weight_type, vector * N, w[v]);
  }
  // Whole warps stay together: every lane takes part in the sums.
  for (uint32_t first = blockIdx.x * kGroups; first < a.rows; first += gridDim.x * kGroups) {
    const uint32_t row = first + threadIdx.x / kLanes;
    const bool active = row < a.rows;
    const T* x = row_address<T>(a.x, row, a.heads);
    const T* z = row_address<T>(a.z, row, a.heads);
    Packed<T, N> x_packed[kVectors], z_packed[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * kLanes + lane;
      if (!active || vector >= a.vectors) continue;
      x_packed[v] = load<N>(x + vector * N);
      z_packed[v] = load<N>(z + vector * N);
    }
    float square = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!active || v * kLanes + lane >= a.vectors) continue;
      float n[N];
      unpack(x_packed[v], n);
#pragma unroll
      for (int i = 0; i < N; ++i) square += n[i] * n[i];
    }
    const float rstd = rsqrtf(lane_sum<kLanes>(square) / static_cast<float>(a.width) + a.eps);
    if (!active) continue;
    if (lane == 0) a.rstd[row] = rstd;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * kLanes + lane;
      if (vector >= a.vectors) continue;
      float n[N], gate[N];
      unpack(x_packed[v], n);
      unpack(z_packed[v], gate);
#pragma unroll
      for (int i = 0; i < N; ++i) n[i] = w[v][i] * (n[i] * rstd) * (gate[i] * sigmoid(gate[i]));
      write(static_cast<T*>(a.y) + static_cast<int64_t>(row) * a.width + vector * N, n);
    }
  }
}

template <class T, int N, int kLanes, int kVectors>
__global__ void __launch_bounds__(kThreads, kVectors == 1 ? kBackwardBlocks : 1)
    backward_kernel(const __grid_constant__ Arguments a) {
  constexpr uint32_t kGroups = kThreads / kLanes;
  const uint32_t lane = threadIdx.x % kLanes;
  float w[kVectors][N], dw[kVectors][N] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t vector = v * kLanes + lane;
    if (vector < a.vectors) read_weight(a.weight, a.weight_type, vector * N, w[v]);
  }
  for (uint32_t first = blockIdx.x * kGroups; first < a.rows; first += gridDim.x * kGroups) {
    const uint32_t row = first + threadIdx.x / kLanes;
    const bool active = row < a.rows;
    const T* x = row_address<T>(a.x, row, a.heads);
    const T* z = row_address<T>(a.z, row, a.heads);
    const T* dy = row_address<T>(a.grad_y, row, a.heads);
    const int64_t out = static_cast<int64_t>(row) * a.width;
    Packed<T, N> x_packed[kVectors], z_packed[kVectors], dy_packed[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * kLanes + lane;
      if (!active || vector >= a.vectors) continue;
      x_packed[v] = load<N>(x + vector * N);
      z_packed[v] = load<N>(z + vector * N);
      dy_packed[v] = load<N>(dy + vector * N);
    }
    const float rstd = active ? a.rstd[row] : 0.f;
    // dn: gradient of the normalised x, from here on in registers; n: the normalised x.
    float n[kVectors][N], dn[kVectors][N], dot = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * kLanes + lane;
      if (!active || vector >= a.vectors) continue;
      float gate[N], g[N];  // z and the gradient of y, then the gradient of z and y
      unpack(x_packed[v], n[v]);
      unpack(z_packed[v], gate);
      unpack(dy_packed[v], g);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        n[v][i] *= rstd;
        const float s = sigmoid(gate[i]), silu = gate[i] * s, gated = g[i] * silu;
        dw[v][i] += gated * n[v][i];
        dn[v][i] = gated * w[v][i];
        dot += dn[v][i] * n[v][i];
        gate[i] = g[i] * w[v][i] * n[v][i] * (s * (1.f + gate[i] * (1.f - s)));
        g[i] = w[v][i] * n[v][i] * silu;
      }
      write(static_cast<T*>(a.grad_z) + out + vector * N, gate);
      if (a.y != nullptr) write(static_cast<T*>(a.y) + out + vector * N, g);
    }
    const float mean = lane_sum<kLanes>(dot) / static_cast<float>(a.width);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * kLanes + lane;
      if (!active || vector >= a.vectors) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) dn[v][i] = rstd * (dn[v][i] - n[v][i] * mean);
      write(static_cast<T*>(a.grad_x) + out + vector * N, dn[v]);
    }
  }
  if (a.partial == nullptr) return;
  store_column_sums<N, kLanes, kVectors>(dw, a.width,
                                         a.partial + static_cast<int64_t>(blockIdx.x) * a.width);
}

int64_t rows_of(const GatedRmsNormShape& shape) { return shape.tokens * shape.heads; }

int64_t backward_blocks(const GatedRmsNormShape& shape) {
  // Eight rows or more per CTA, so that the partial sums stay few.
  return lane_row_blocks(rows_of(shape) / 8, multiprocessors() * int64_t{kBackwardBlocks});
}

Arguments arguments_of(const GatedRmsNormShape& shape, int n, const InputRows& x,
                       const InputRows& z, const void* weight) {
  Arguments a{};
  a.rows = static_cast<uint32_t>(rows_of(shape));
  a.heads = static_cast<uint32_t>(shape.heads);
  a.width = static_cast<uint32_t>(shape.width);
  a.vectors = a.width / static_cast<uint32_t>(n);
  a.weight_type = shape.weight_type;
  a.x = x;
  a.z = z;
  a.weight = weight;
  return a;
}

bool weight_aligned(const GatedRmsNormShape& shape, const void* weight) {
  return aligned(InputRows{weight, 0, 0}, shape.weight_type, 16, 16);
}

}  // namespace

void gated_rms_norm_forward(const GatedRmsNormShape& shape, const InputRows& x, const InputRows& z,
                            const void* weight, float eps, void* y, float* rstd,
                            cudaStream_t stream) {
  if (rows_of(shape) == 0 || shape.width == 0) return;
  const bool wide = aligned(x, shape.type, shape.width, 16) &&
                    aligned(z, shape.type, shape.width, 16) && weight_aligned(shape, weight);
  dispatch_access(shape.type, wide, [&](auto access) {
    using T = typename decltype(access)::Type;
    constexpr int N = decltype(access)::kWidth;
    Arguments a = arguments_of(shape, N, x, z, weight);
    a.eps = eps;
    a.y = y;
    a.rstd = rstd;
    dispatch_lanes<N>("gated_rms_norm", shape.width, [&](auto lanes, auto vectors) {
      const auto blocks = static_cast<unsigned>(
          lane_row_blocks((rows_of(shape) * lanes.value + kThreads - 1) / kThreads,
                          multiprocessors() * int64_t{6}));
      forward_kernel<T, N, lanes.value, vectors.value><<<blocks, kThreads, 0, stream>>>(a);
    });
  });
  check_launch("gated_rms_norm_forward");
}

int64_t gated_rms_norm_backward_workspace(const GatedRmsNormShape& shape) {
  return backward_blocks(shape) * shape.width;
}

void gated_rms_norm_backward(const GatedRmsNormShape& shape, const InputRows& x, const InputRows& z,
                             const void* weight, const float* rstd, const InputRows& grad_y,
                             void* grad_x, void* grad_z, void* grad_weight, void* y,
                             float* workspace, cudaStream_t stream) {
  if (shape.width == 0) return;
  const bool wide = aligned(x, shape.type, shape.width, 16) &&
                    aligned(z, shape.type, shape.width, 16) &&
                    aligned(grad_y, shape.type, shape.width, 16) && weight_aligned(shape, weight);
  const int64_t blocks = backward_blocks(shape);
  dispatch_access(shape.type, wide, [&](auto access) {
    using T = typename decltype(access)::Type;
    constexpr int N = decltype(access)::kWidth;
    Arguments a = arguments_of(shape, N, x, z, weight);
    a.grad_y = grad_y;
    a.grad_x = grad_x;
    a.grad_z = grad_z;
    a.rstd = const_cast<float*>(rstd);
    a.y = y;
    a.partial = grad_weight != nullptr ? workspace : nullptr;
    dispatch_lanes<N>("gated_rms_norm", shape.width, [&](auto lanes, auto vectors) {
      backward_kernel<T, N, lanes.value, vectors.value>
          <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(a);
    });
  });
  check_launch("gated_rms_norm_backward");
  if (grad_weight != nullptr)
    column_sum(workspace, blocks, shape.width, grad_weight, shape.weight_type, stream);
}

}  // namespace heddle::ops::cuda
