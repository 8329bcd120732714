// A block per row: the results stay in registers between the row's largest magnitude and its 8-bit
// values.
#include "ops/cuda/gated_product_fp8.h"

#include <stdexcept>
#include <string>

#include "ops/cuda/fp8.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kWidth = 8;

using Vector = Packed<bf16, kWidth>;

struct Arguments {
  int width;
  InputRows x, gate, grad_y;
  OutputRows y, grad_x, grad_gate;
  Fp8Rows first, second;
};

__device__ __forceinline__ const bf16* row_of(const InputRows& rows) {
  return static_cast<const bf16*>(rows.data) + blockIdx.x * rows.outer_stride;
}
__device__ __forceinline__ bf16* row_of(const OutputRows& rows) {
  return static_cast<bf16*>(rows.data) + blockIdx.x * rows.outer_stride;
}

/// A row of kHeld vectors a thread in 8 bits; `largest` is the row's.
template <int kThreads, int kHeld>
__device__ __forceinline__ void write_fp8(const Fp8Rows& rows, const Vector (&held)[kHeld],
                                          int width, float largest) {
  const float scale = fp8_scale(largest), inverse = 1.f / scale;
  if (threadIdx.x == 0) rows.scales[blockIdx.x] = scale;
  uint8_t* const row = static_cast<uint8_t*>(rows.values) + int64_t{blockIdx.x} * width;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int column = (k * kThreads + threadIdx.x) * kWidth;
    if (column >= width) break;
    float v[kWidth];
    unpack<kWidth, bf16>(held[k], v);
    *reinterpret_cast<uint2*>(row + column) = fp8_of(v, inverse);
  }
}

template <int kThreads, int kHeld>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ Arguments a) {
  __shared__ float scratch[32];
  const bf16 *const x_row = row_of(a.x), *const gate_row = row_of(a.gate);
  Vector held[kHeld], gate[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int column = (k * kThreads + threadIdx.x) * kWidth;
    if (column >= a.width) break;
    held[k] = load<kWidth>(x_row + column);
    gate[k] = load<kWidth>(gate_row + column);
  }
  float largest = 0.f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int column = (k * kThreads + threadIdx.x) * kWidth;
    if (column >= a.width) break;
    float y[kWidth], g[kWidth];
    unpack<kWidth, bf16>(held[k], y);
    unpack<kWidth, bf16>(gate[k], g);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) y[i] *= g[i] * sigmoid(g[i]);
    held[k] = pack<bf16>(y);
    store(row_of(a.y) + column, held[k]);
    largest = fmaxf(largest, largest_of(held[k]));
  }
  write_fp8<kThreads>(a.first, held, a.width, block_largest(largest, scratch));
}

template <int kThreads, int kHeld>
__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ Arguments a) {
  __shared__ float scratch[2][32];
  const bf16 *const x_row = row_of(a.x), *const gate_row = row_of(a.gate),
                    *const grad_row = row_of(a.grad_y);
  Vector held_x[kHeld], held_gate[kHeld], grad[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int column = (k * kThreads + threadIdx.x) * kWidth;
    if (column >= a.width) break;
    held_x[k] = load<kWidth>(x_row + column);
    held_gate[k] = load<kWidth>(gate_row + column);
    grad[k] = load<kWidth>(grad_row + column);
  }
  float largest_x = 0.f, largest_gate = 0.f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int column = (k * kThreads + threadIdx.x) * kWidth;
    if (column >= a.width) break;
    float dx[kWidth], dg[kWidth], dy[kWidth], y[kWidth];
    unpack<kWidth, bf16>(held_x[k], dx);
    unpack<kWidth, bf16>(held_gate[k], dg);
    unpack<kWidth, bf16>(grad[k], dy);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      // Terms follow gated_product.cu one by one: the same bits.
      const float g = dg[i], s = sigmoid(g), value = g * s, slope = s * (1.f + g * (1.f - s));
      y[i] = dx[i] * value;
      dg[i] = dy[i] * dx[i] * slope;
      dx[i] = dy[i] * value;
    }
    held_x[k] = pack<bf16>(dx);
    held_gate[k] = pack<bf16>(dg);
    store(row_of(a.grad_x) + column, held_x[k]);
    store(row_of(a.grad_gate) + column, held_gate[k]);
    if (a.y.data != nullptr) write(row_of(a.y) + column, y);
    largest_x = fmaxf(largest_x, largest_of(held_x[k]));
    largest_gate = fmaxf(largest_gate, largest_of(held_gate[k]));
  }
  largest_x = block_largest(largest_x, scratch[0]);
  largest_gate = block_largest(largest_gate, scratch[1]);
  write_fp8<kThreads>(a.first, held_x, a.width, largest_x);
  write_fp8<kThreads>(a.second, held_gate, a.width, largest_gate);
}

template <class F>
void dispatch(int64_t width, const F& f) {
  if (width > kGatedProductLongestFp8Row)
    throw std::invalid_argument("swiglu in 8 bits: rows of " + std::to_string(width) +
                                " elements, the CUDA kernel takes " +
                                std::to_string(kGatedProductLongestFp8Row));
  using std::integral_constant;
  if (width <= 1024) return f(integral_constant<int, 128>(), integral_constant<int, 1>());
  if (width <= 2048) return f(integral_constant<int, 256>(), integral_constant<int, 1>());
  if (width <= 4096) return f(integral_constant<int, 256>(), integral_constant<int, 2>());
  if (width <= 8192) return f(integral_constant<int, 512>(), integral_constant<int, 2>());
  return f(integral_constant<int, 640>(), integral_constant<int, 2>());
}

}  // namespace

void swiglu_forward_fp8(int64_t rows, int64_t width, const InputRows& x, const InputRows& gate,
                        const OutputRows& y, const Fp8Rows& y_fp8, cudaStream_t stream) {
  if (rows == 0 || width == 0) return;
  const Arguments a{static_cast<int>(width), x, gate, {}, y, {}, {}, y_fp8, {}};
  dispatch(width, [&](auto threads, auto held) {
    forward_kernel<threads.value, held.value>
        <<<static_cast<unsigned>(rows), threads.value, 0, stream>>>(a);
  });
  check_launch("swiglu_forward_fp8");
}

void swiglu_backward_fp8(int64_t rows, int64_t width, const InputRows& x, const InputRows& gate,
                         const InputRows& grad_y, const OutputRows& grad_x,
                         const OutputRows& grad_gate, const OutputRows& y,
                         const Fp8Rows& grad_x_fp8, const Fp8Rows& grad_gate_fp8,
                         cudaStream_t stream) {
  if (rows == 0 || width == 0) return;
  const Arguments a{
      static_cast<int>(width), x, gate, grad_y, y, grad_x, grad_gate, grad_x_fp8, grad_gate_fp8};
  dispatch(width, [&](auto threads, auto held) {
    backward_kernel<threads.value, held.value>
        <<<static_cast<unsigned>(rows), threads.value, 0, stream>>>(a);
  });
  check_launch("swiglu_backward_fp8");
}

}  // namespace heddle::ops::cuda
