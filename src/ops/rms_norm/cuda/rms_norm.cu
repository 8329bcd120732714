// One CTA per row at a time, persistent: each thread holds up to kVectors accesses of the row in
// registers, so a row is read once; one barrier per row (the sums alternate between two scratch
// areas). The backward keeps each thread's columns of the weight's gradient in registers over all
// rows of the CTA and leaves one row of partial sums.
#include "ops/rms_norm/cuda/rms_norm.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/cuda/column_sum.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fp8.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

struct Arguments {
  uint32_t rows, width, vectors;  // vectors: accesses in a row
  Element weight_type;
  float eps, offset;
  InputRows x, residual, grad_y, grad_y_2, grad_sum;
  const void* weight;
  void *y, *sum, *grad_x;
  float* rstd;
  float* partial;
  Fp8Rows fp8;  // of y, or of grad_x
};

/// A thread's part of a row in 8 bits; `largest` is that of its own elements.
template <int N, int kVectors>
__device__ __forceinline__ void write_fp8(const Fp8Rows& rows,
                                          const Packed<bf16, N> (&held)[kVectors], uint32_t row,
                                          uint32_t width, float largest, float* scratch) {
  const float scale = fp8_scale(block_largest(largest, scratch)), inverse = 1.f / scale;
  if (threadIdx.x == 0) rows.scales[row] = scale;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t column = (v * blockDim.x + threadIdx.x) * N;
    if (column >= width) continue;
    float x[N];
    unpack<N, bf16>(held[v], x);
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(rows.values) + int64_t{row} * width + column) =
        fp8_of(x, inverse);
  }
}

template <class T, int N, int kVectors, bool kEight>
__global__ void __launch_bounds__(N == 1 ? 1024 : 512, N > 1 && kVectors == 1 ? 4 : 1)
    forward_kernel(const __grid_constant__ Arguments a) {
  __shared__ float scratch[2][32];
  [[maybe_unused]] __shared__ float largest_scratch[2][32];
  int phase = 0;
  let_next_begin();
  wait_for_previous();
  for (uint32_t row = blockIdx.x; row < a.rows; row += gridDim.x, phase ^= 1) {
    const T* x = static_cast<const T*>(a.x.data) + row * a.x.outer_stride;
    const int64_t out = static_cast<int64_t>(row) * a.width;
    Packed<T, N> packed[kVectors], added[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * blockDim.x + threadIdx.x;
      if (vector >= a.vectors) continue;
      packed[v] = load<N>(x + vector * N);
      if (a.sum != nullptr) {
        added[v] = load<N>(static_cast<const T*>(a.residual.data) + row * a.residual.outer_stride +
                           vector * N);
      }
    }
    float square = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * blockDim.x + threadIdx.x;
      if (vector >= a.vectors) continue;
      float s[N];
      unpack(packed[v], s);
      if (a.sum != nullptr) {
        float r[N];
        unpack(added[v], r);
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] += r[i];
        // The stored value is the normalised one: the backward sees equal numbers.
        packed[v] = pack<T>(s);
        store(static_cast<T*>(a.sum) + out + vector * N, packed[v]);
        unpack(packed[v], s);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) square += s[i] * s[i];
    }
    const float rstd =
        rsqrtf(block_sum(square, scratch[phase]) / static_cast<float>(a.width) + a.eps);
    if (threadIdx.x == 0) a.rstd[row] = rstd;
    [[maybe_unused]] float largest = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * blockDim.x + threadIdx.x;
      if (vector >= a.vectors) continue;
      float s[N], w[N];
      unpack(packed[v], s);
      read_weight(a.weight, a.weight_type, vector * N, w);
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] = s[i] * rstd * (a.offset + w[i]);
      packed[v] = pack<T>(s);
      store(static_cast<T*>(a.y) + out + vector * N, packed[v]);
      if constexpr (kEight) largest = fmaxf(largest, largest_of(packed[v]));
    }
    if constexpr (kEight) write_fp8(a.fp8, packed, row, a.width, largest, largest_scratch[phase]);
  }
}

/// A thread's part of one row in the backward. kTwo: y had two readers.
template <class T, int N, int kVectors, bool kTwo>
struct BackwardRow {
  Packed<T, N> x[kVectors], dy[kVectors], sum[kVectors], dy_2[kTwo ? kVectors : 1];
  float rstd;

  __device__ __forceinline__ void fetch(const Arguments& a, uint32_t row) {
    const T* x_row = static_cast<const T*>(a.x.data) + row * a.x.outer_stride;
    const T* dy_row = static_cast<const T*>(a.grad_y.data) + row * a.grad_y.outer_stride;
    const T* dy_2_row = static_cast<const T*>(a.grad_y_2.data) + row * a.grad_y_2.outer_stride;
    const T* sum_row = static_cast<const T*>(a.grad_sum.data) + row * a.grad_sum.outer_stride;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * blockDim.x + threadIdx.x;
      if (vector >= a.vectors) continue;
      x[v] = load<N>(x_row + vector * N);
      dy[v] = load<N>(dy_row + vector * N);
      if constexpr (kTwo) dy_2[v] = load<N>(dy_2_row + vector * N);
      if (a.grad_sum.data != nullptr) sum[v] = load<N>(sum_row + vector * N);
    }
    rstd = a.rstd[row];
  }
};

template <class T, int N, int kVectors, bool kTwo, bool kEight>
__global__ void __launch_bounds__(N == 1 ? 1024 : 512, N > 1 && kVectors == 1 ? 2 : 1)
    backward_kernel(const __grid_constant__ Arguments a) {
  __shared__ float scratch[2][32];
  [[maybe_unused]] __shared__ float largest_scratch[2][32];
  float dw[kVectors][N] = {};
  int phase = 0;
  // With one access a thread there are registers to spare for the next row's.
  constexpr bool kFetchAhead = kVectors == 1;
  BackwardRow<T, N, kVectors, kTwo> next;
  if (kFetchAhead && blockIdx.x < a.rows) next.fetch(a, blockIdx.x);
  for (uint32_t row = blockIdx.x; row < a.rows; row += gridDim.x, phase ^= 1) {
    if (!kFetchAhead) next.fetch(a, row);
    const BackwardRow<T, N, kVectors, kTwo> in = next;
    if (kFetchAhead && row + gridDim.x < a.rows) next.fetch(a, row + gridDim.x);
    // n: the normalised input; g: the gradient with respect to it.
    float n[kVectors][N], g[kVectors][N], dot = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * blockDim.x + threadIdx.x;
      if (vector >= a.vectors) continue;
      float w[N];
      unpack(in.x[v], n[v]);
      unpack(in.dy[v], g[v]);
      if constexpr (kTwo) {
        float other[N];
        unpack(in.dy_2[v], other);
#pragma unroll
        for (int i = 0; i < N; ++i) g[v][i] += other[i];
      }
      read_weight(a.weight, a.weight_type, vector * N, w);
      float y[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        n[v][i] *= in.rstd;
        y[i] = n[v][i] * (a.offset + w[i]);
        dw[v][i] += g[v][i] * n[v][i];
        g[v][i] *= a.offset + w[i];
        dot += g[v][i] * n[v][i];
      }
      if (a.y != nullptr)
        write(static_cast<T*>(a.y) + static_cast<int64_t>(row) * a.width + vector * N, y);
    }
    [[maybe_unused]] float largest = 0;
    Packed<T, N> packed[kVectors];
    const float mean = block_sum(dot, scratch[phase]) / static_cast<float>(a.width);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = v * blockDim.x + threadIdx.x;
      if (vector >= a.vectors) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) g[v][i] = in.rstd * (g[v][i] - n[v][i] * mean);
      if (a.grad_sum.data != nullptr) {
        float s[N];
        unpack(in.sum[v], s);
#pragma unroll
        for (int i = 0; i < N; ++i) g[v][i] += s[i];
      }
      packed[v] = pack<T>(g[v]);
      store(static_cast<T*>(a.grad_x) + static_cast<int64_t>(row) * a.width + vector * N,
            packed[v]);
      if constexpr (kEight) largest = fmaxf(largest, largest_of(packed[v]));
    }
    if constexpr (kEight) write_fp8(a.fp8, packed, row, a.width, largest, largest_scratch[phase]);
  }
  if (a.partial == nullptr) return;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const uint32_t vector = v * blockDim.x + threadIdx.x;
    if (vector >= a.vectors) continue;
    float* partial = a.partial + static_cast<int64_t>(blockIdx.x) * a.width + vector * N;
#pragma unroll
    for (int i = 0; i < N; ++i) partial[i] = dw[v][i];
  }
}

/// Threads and accesses per thread of one row.
struct Plan {
  int vectors_per_thread, threads;
};

Plan plan_of(int64_t vectors) {
  // Up to 512 threads one access each; longer rows take more accesses before more threads.
  const int per_thread = vectors <= 512 ? 1 : vectors <= 1024 ? 2 : 4;
  const int64_t threads = (vectors + per_thread - 1) / per_thread;
  return {per_thread, static_cast<int>((threads + 31) / 32 * 32)};
}

template <class F>
void dispatch_vectors(int per_thread, const F& f) {
  switch (per_thread) {
    case 1:
      return f(std::integral_constant<int, 1>());
    case 2:
      return f(std::integral_constant<int, 2>());
    default:
      return f(std::integral_constant<int, 4>());
  }
}

/// Calls f(true or false) by whether rows in 8 bits are wanted, which accesses of 16 bytes alone
/// write.
template <class T, int N, class F>
void with_eight_bit(const Fp8Rows& rows, const F& f) {
  if constexpr (sizeof(T) == 2 && N == 8) {
    if (rows.values != nullptr) return f(std::true_type());
  } else if (rows.values != nullptr) {
    throw std::invalid_argument("rms_norm: rows in 8 bits of others than bf16 on 16 bytes");
  }
  f(std::false_type());
}

void check_width(int64_t width, bool wide) {
  const int64_t limit = wide ? kRmsNormLongestRow : kRmsNormLongestOddRow;
  if (width > limit) {
    throw std::invalid_argument("rms_norm: rows of " + std::to_string(width) +
                                " elements, the CUDA kernel takes " + std::to_string(limit) +
                                (wide ? "" : " where they are not aligned to 16 bytes"));
  }
}

/// As many CTAs as fit on the device at once, but no more than rows.
int64_t resident_blocks(int64_t rows, int threads, int threads_per_multiprocessor) {
  return std::min<int64_t>(
      rows, multiprocessors() * std::max<int64_t>(1, threads_per_multiprocessor / threads));
}

bool wide_access(const RmsNormShape& shape, std::initializer_list<InputRows> rows,
                 const void* weight) {
  const InputRows weights{weight, 0, 0};
  return std::all_of(rows.begin(), rows.end(),
                     [&](const InputRows& r) { return aligned(r, shape.type, shape.width, 16); }) &&
         aligned(weights, shape.weight_type, 16, 16);
}

int64_t backward_blocks(const RmsNormShape& shape) {
  // One bound for every access width, so that the workspace does not hang on the pointers.
  return std::min<int64_t>(shape.rows, multiprocessors() * int64_t{8});
}

}  // namespace

void rms_norm_forward(const RmsNormShape& shape, const InputRows& x, const InputRows& residual,
                      const void* weight, float eps, void* y, void* sum, float* rstd,
                      cudaStream_t stream, const Fp8Rows& y_fp8) {
  if (shape.rows == 0 || shape.width == 0) return;
  const bool wide = wide_access(shape, {x, residual, {y, 0, 0}, {sum, 0, 0}}, weight);
  check_width(shape.width, wide);
  dispatch_access(shape.type, wide, [&](auto access) {
    using T = typename decltype(access)::Type;
    constexpr int N = decltype(access)::kWidth;
    const Plan plan = plan_of(shape.width / N);
    const Arguments a{static_cast<uint32_t>(shape.rows),
                      static_cast<uint32_t>(shape.width),
                      static_cast<uint32_t>(shape.width / N),
                      shape.weight_type,
                      eps,
                      shape.offset,
                      x,
                      residual,
                      {},
                      {},
                      {},
                      weight,
                      y,
                      sum,
                      nullptr,
                      rstd,
                      nullptr,
                      y_fp8};
    const auto blocks = static_cast<unsigned>(
        resident_blocks(shape.rows, plan.threads, plan.vectors_per_thread == 1 ? 2048 : 1024));
    dispatch_vectors(plan.vectors_per_thread, [&](auto v) {
      with_eight_bit<T, N>(y_fp8, [&](auto eight) {
        launch_dependent(forward_kernel<T, N, v.value, eight.value>, dim3(blocks),
                         dim3(static_cast<unsigned>(plan.threads)), 0, stream, a);
      });
    });
  });
  check_launch("rms_norm_forward");
}

int64_t rms_norm_backward_workspace(const RmsNormShape& shape) {
  return backward_blocks(shape) * shape.width;
}

void rms_norm_backward(const RmsNormShape& shape, const InputRows& input, const void* weight,
                       const float* rstd, const NormGradients& grads, void* grad_input,
                       void* grad_weight, void* y, float* workspace, cudaStream_t stream,
                       const Fp8Rows& grad_input_fp8) {
  if (shape.width == 0) return;
  const bool wide = wide_access(
      shape, {input, grads.y, grads.y_2, grads.sum, {grad_input, 0, 0}, {y, 0, 0}}, weight);
  check_width(shape.width, wide);
  int64_t blocks = 0;
  if (shape.rows > 0) {
    dispatch_access(shape.type, wide, [&](auto access) {
      using T = typename decltype(access)::Type;
      constexpr int N = decltype(access)::kWidth;
      const Plan plan = plan_of(shape.width / N);
      blocks = std::min(
          backward_blocks(shape),
          resident_blocks(shape.rows, plan.threads, plan.vectors_per_thread == 1 ? 1024 : 640));
      const Arguments a{static_cast<uint32_t>(shape.rows),
                        static_cast<uint32_t>(shape.width),
                        static_cast<uint32_t>(shape.width / N),
                        shape.weight_type,
                        0,
                        shape.offset,
                        input,
                        {},
                        grads.y,
                        grads.y_2,
                        grads.sum,
                        weight,
                        y,
                        nullptr,
                        grad_input,
                        const_cast<float*>(rstd),
                        grad_weight != nullptr ? workspace : nullptr,
                        grad_input_fp8};
      const auto launch = [&](auto v, auto two) {
        with_eight_bit<T, N>(grad_input_fp8, [&](auto eight) {
          backward_kernel<T, N, v.value, two.value, eight.value>
              <<<static_cast<unsigned>(blocks), plan.threads, 0, stream>>>(a);
        });
      };
      dispatch_vectors(plan.vectors_per_thread, [&](auto v) {
        if (grads.y_2.data != nullptr) {
          launch(v, std::true_type());
        } else {
          launch(v, std::false_type());
        }
      });
    });
    check_launch("rms_norm_backward");
  }
  if (grad_weight != nullptr)
    column_sum(workspace, blocks, shape.width, grad_weight, shape.weight_type, stream);
}

}  // namespace heddle::ops::cuda
