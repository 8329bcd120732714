// A group of lanes holds one head of one token in registers (a warp at 256 bf16 elements), CTAs are
// persistent. The other half of a rotated pair sits in another lane: it is read again, from the
// first-level cache. The next row's loads are issued before this row is worked on.
#include "ops/rotary/cuda/qk_norm_rope.h"

#include <algorithm>

#include "ops/cuda/column_sum.h"
#include "ops/cuda/lanes.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = kLaneRowThreads;

struct Arguments {
  uint32_t rows, heads, width, vectors, half;
  Element weight_type;
  float eps;
  InputRows x, grad_y;
  OutputRows grad_x;
  const void* weight;
  const float *cos, *sin;
  void* y;
  float* rstd;
  float* partial;
};

/// N entries of a table of angles from `first` on.
template <int N>
__device__ __forceinline__ void read_angles(const float* table, float (&angles)[N]) {
  if constexpr (N == 8) {
    read_weight(table, Element::kFloat32, 0, angles);
  } else {
    read(table, angles);
  }
}

/// The turn of the element at i: its partner's offset in the row, and the sign of the sine where
/// out = own * cos + sign * partner * sin. The backward turns by the negative angle.
struct Turn {
  uint32_t partner, angle;
  float sign;

  __device__ Turn(uint32_t i, uint32_t half)
      : partner(i < half ? i + half : i - half),
        angle(i < half ? i : i - half),
        sign(i < half ? -1.f : 1.f) {}
};

/// What a lane reads of one row of one tensor: its own elements and the partners of those that are
/// rotated.
template <class T, int N, int kVectors>
struct Row {
  Packed<T, N> own[kVectors], partner[kVectors];

  __device__ __forceinline__ void fetch(const T* row, const Arguments& a, uint32_t first,
                                        uint32_t step) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t i = first + v * step;
      if (i < a.width) own[v] = load<N>(row + i);
      if (i < 2 * a.half) partner[v] = load<N>(row + Turn(i, a.half).partner);
    }
  }
};

template <class T, int N, int kLanes, int kVectors>
__global__ void __launch_bounds__(kThreads, kVectors* N <= 8 ? 4 : 1)
    forward_kernel(const __grid_constant__ Arguments a) {
  constexpr uint32_t kGroups = kThreads / kLanes, kStep = kLanes * N;
  const uint32_t i0 = threadIdx.x % kLanes * N, stride = gridDim.x * kGroups;
  const float width = static_cast<float>(a.width);
  Row<T, N, kVectors> next;
  uint32_t row = blockIdx.x * kGroups + threadIdx.x / kLanes;
  if (row < a.rows) next.fetch(row_address<T>(a.x, row, a.heads), a, i0, kStep);
  // Whole warps stay together: every lane takes part in the sums.
  for (uint32_t first = blockIdx.x * kGroups; first < a.rows; first += stride, row += stride) {
    const bool active = row < a.rows;
    const Row<T, N, kVectors> x = next;
    if (row + stride < a.rows) {
      next.fetch(row_address<T>(a.x, row + stride, a.heads), a, i0, kStep);
    }
    float square = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!active || i0 + v * kStep >= a.width) continue;
      float n[N];
      unpack(x.own[v], n);
#pragma unroll
      for (int j = 0; j < N; ++j) square += n[j] * n[j];
    }
    const float rstd = rsqrtf(lane_sum<kLanes>(square) / width + a.eps);
    if (!active) continue;
    if (i0 == 0) a.rstd[row] = rstd;
    const int64_t angles = static_cast<int64_t>(row / a.heads) * a.half;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t i = i0 + v * kStep;
      if (i >= a.width) continue;
      float n[N], w[N];
      unpack(x.own[v], n);
      read_weight(a.weight, a.weight_type, i, w);
#pragma unroll
      for (int j = 0; j < N; ++j) n[j] = n[j] * rstd * (1.f + w[j]);
      if (i < 2 * a.half) {
        const Turn turn(i, a.half);
        float other[N], cos[N], sin[N];
        unpack(x.partner[v], other);
        read_weight(a.weight, a.weight_type, turn.partner, w);
        read_angles(a.cos + angles + turn.angle, cos);
        read_angles(a.sin + angles + turn.angle, sin);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          n[j] = n[j] * cos[j] + turn.sign * (other[j] * rstd * (1.f + w[j])) * sin[j];
        }
      }
      write(static_cast<T*>(a.y) + static_cast<int64_t>(row) * a.width + i, n);
    }
  }
}

template <class T, int N, int kLanes, int kVectors>
__global__ void __launch_bounds__(kThreads, kVectors* N <= 8 ? 4 : 1)
    backward_kernel(const __grid_constant__ Arguments a) {
  constexpr uint32_t kGroups = kThreads / kLanes, kStep = kLanes * N;
  const uint32_t i0 = threadIdx.x % kLanes * N, stride = gridDim.x * kGroups;
  float dw[kVectors][N] = {};
  Packed<T, N> next_x[kVectors];
  Row<T, N, kVectors> next_dy;
  float next_rstd = 0;
  const auto fetch = [&](uint32_t row) {
    const T* x = row_address<T>(a.x, row, a.heads);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (i0 + v * kStep < a.width) next_x[v] = load<N>(x + i0 + v * kStep);
    }
    next_dy.fetch(row_address<T>(a.grad_y, row, a.heads), a, i0, kStep);
    next_rstd = a.rstd[row];
  };
  uint32_t row = blockIdx.x * kGroups + threadIdx.x / kLanes;
  if (row < a.rows) fetch(row);
  for (uint32_t first = blockIdx.x * kGroups; first < a.rows; first += stride, row += stride) {
    const bool active = row < a.rows;
    const Row<T, N, kVectors> dy = next_dy;
    const float rstd = next_rstd;
    // n: the normalised x before the weight; dn: the gradient with respect to it.
    float n[kVectors][N], dn[kVectors][N], dot = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) unpack(next_x[v], n[v]);
    if (row + stride < a.rows) fetch(row + stride);
    const int64_t angles = static_cast<int64_t>(row / a.heads) * a.half;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t i = i0 + v * kStep;
      if (!active || i >= a.width) continue;
      unpack(dy.own[v], dn[v]);
      if (i < 2 * a.half) {
        const Turn turn(i, a.half);
        float other[N], cos[N], sin[N];
        unpack(dy.partner[v], other);
        read_angles(a.cos + angles + turn.angle, cos);
        read_angles(a.sin + angles + turn.angle, sin);
#pragma unroll
        for (int j = 0; j < N; ++j) dn[v][j] = dn[v][j] * cos[j] - turn.sign * other[j] * sin[j];
      }
      float w[N];
      read_weight(a.weight, a.weight_type, i, w);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        n[v][j] *= rstd;
        dw[v][j] += dn[v][j] * n[v][j];
        dn[v][j] *= 1.f + w[j];
        dot += dn[v][j] * n[v][j];
      }
    }
    const float mean = lane_sum<kLanes>(dot) / static_cast<float>(a.width);
    if (!active) continue;
    T* dx = row_address<T>(a.grad_x, row, a.heads);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t i = i0 + v * kStep;
      if (i >= a.width) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) dn[v][j] = rstd * (dn[v][j] - n[v][j] * mean);
      write(dx + i, dn[v]);
    }
  }
  store_column_sums<N, kLanes, kVectors>(dw, a.width,
                                         a.partial + static_cast<int64_t>(blockIdx.x) * a.width);
}

int64_t rows_of(const QkNormRopeShape& shape) { return shape.tokens * shape.heads; }

int64_t backward_blocks(const QkNormRopeShape& shape) {
  return lane_row_blocks(rows_of(shape) / 8, multiprocessors() * int64_t{4});
}

Arguments arguments_of(const QkNormRopeShape& shape, const InputRows& x, const void* weight,
                       const float* cos, const float* sin) {
  Arguments a{};
  a.rows = static_cast<uint32_t>(rows_of(shape));
  a.heads = static_cast<uint32_t>(shape.heads);
  a.width = static_cast<uint32_t>(shape.width);
  a.half = static_cast<uint32_t>(shape.half);
  a.weight_type = shape.weight_type;
  a.x = x;
  a.weight = weight;
  a.cos = cos;
  a.sin = sin;
  return a;
}

/// Whether an access may be wide: it must not straddle the two halves of the rotated part either.
bool wide_access(const QkNormRopeShape& shape, const InputRows& x, const void* weight,
                 const float* cos, const float* sin) {
  const auto is_aligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  return aligned(x, shape.type, shape.width, 16) && shape.half % (16 / bytes_of(shape.type)) == 0 &&
         is_aligned(weight) && is_aligned(cos) && is_aligned(sin);
}

}  // namespace

void qk_norm_rope_forward(const QkNormRopeShape& shape, const InputRows& x, const void* weight,
                          const float* cos, const float* sin, float eps, void* y, float* rstd,
                          cudaStream_t stream) {
  if (rows_of(shape) == 0 || shape.width == 0) return;
  Arguments a = arguments_of(shape, x, weight, cos, sin);
  a.eps = eps;
  a.y = y;
  a.rstd = rstd;
  dispatch_access(shape.type, wide_access(shape, x, weight, cos, sin), [&](auto access) {
    using T = typename decltype(access)::Type;
    constexpr int N = decltype(access)::kWidth;
    dispatch_lanes<N>("qk_norm_rope", shape.width, [&](auto lanes, auto vectors) {
      constexpr int kLanes = decltype(lanes)::value, kVectors = decltype(vectors)::value;
      const auto blocks = static_cast<unsigned>(lane_row_blocks(
          (rows_of(shape) * kLanes + kThreads - 1) / kThreads, multiprocessors() * int64_t{4}));
      forward_kernel<T, N, kLanes, kVectors><<<blocks, kThreads, 0, stream>>>(a);
    });
  });
  check_launch("qk_norm_rope_forward");
}

int64_t qk_norm_rope_backward_workspace(const QkNormRopeShape& shape) {
  return backward_blocks(shape) * shape.width;
}

void qk_norm_rope_backward(const QkNormRopeShape& shape, const InputRows& x, const void* weight,
                           const float* cos, const float* sin, const float* rstd,
                           const InputRows& grad_y, const OutputRows& grad_x, void* grad_weight,
                           float* workspace, cudaStream_t stream) {
  if (shape.width == 0) return;
  Arguments a = arguments_of(shape, x, weight, cos, sin);
  a.grad_y = grad_y;
  a.grad_x = grad_x;
  a.rstd = const_cast<float*>(rstd);
  a.partial = workspace;
  const int64_t blocks = backward_blocks(shape);
  const bool wide = wide_access(shape, x, weight, cos, sin) &&
                    aligned(grad_y, shape.type, shape.width, 16) &&
                    aligned(grad_x, shape.type, shape.width, 16);
  dispatch_access(shape.type, wide, [&](auto access) {
    using T = typename decltype(access)::Type;
    constexpr int N = decltype(access)::kWidth;
    dispatch_lanes<N>("qk_norm_rope", shape.width, [&](auto lanes, auto vectors) {
      backward_kernel<T, N, decltype(lanes)::value, decltype(vectors)::value>
          <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(a);
    });
  });
  check_launch("qk_norm_rope_backward");
  column_sum(workspace, blocks, shape.width, grad_weight, shape.weight_type, stream);
}

}  // namespace heddle::ops::cuda
