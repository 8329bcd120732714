// One access of each tensor per thread and step, kSteps of them loaded before the first is used.
#include "ops/cuda/gated_product.h"

#include <stdexcept>
#include <string>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 256, kSteps = 2;

struct Arguments {
  uint32_t accesses;  // of the whole tensor
  Divisor per_row, inner;
  InputRows x, gate, grad_y;
  OutputRows y, grad_x, grad_gate;
};

/// Where one access lies: its row, and the first element within it.
struct Place {
  uint32_t outer, inner, column;

  __device__ Place(const Arguments& a, uint32_t access, uint32_t n) {
    const uint32_t row = a.per_row.divide(access);
    column = (access - row * a.per_row.value) * n;
    outer = a.inner.divide(row);
    inner = row - outer * a.inner.value;
  }
  template <class T, class Pointer>
  __device__ auto in(const Rows<Pointer>& rows) const {
    const int64_t offset = outer * rows.outer_stride + inner * rows.inner_stride + column;
    if constexpr (std::is_same_v<Pointer, const void*>) {
      return static_cast<const T*>(rows.data) + offset;
    } else {
      return static_cast<T*>(rows.data) + offset;
    }
  }
};

struct Activation {
  float value, derivative;
};

template <GateActivation kActivation>
__device__ __forceinline__ Activation activate(float x) {
  const float s = sigmoid(x);
  if constexpr (kActivation == GateActivation::kSigmoid) return {s, s * (1.f - s)};
  return {x * s, s * (1.f + x * (1.f - s))};
}

template <class T, int N, GateActivation kActivation>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ Arguments a) {
  const uint32_t first = blockIdx.x * (kThreads * kSteps) + threadIdx.x;
  let_next_begin();
  wait_for_previous();
  Packed<T, N> x[kSteps], gate[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const uint32_t access = first + k * kThreads;
    if (access >= a.accesses) break;
    const Place place(a, access, N);
    x[k] = load<N>(place.in<T>(a.x));
    gate[k] = load<N>(place.in<T>(a.gate));
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const uint32_t access = first + k * kThreads;
    if (access >= a.accesses) break;
    float y[N], g[N];
    unpack(x[k], y);
    unpack(gate[k], g);
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] *= activate<kActivation>(g[i]).value;
    write(Place(a, access, N).in<T>(a.y), y);
  }
}

template <class T, int N, GateActivation kActivation>
__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ Arguments a) {
  const uint32_t first = blockIdx.x * (kThreads * kSteps) + threadIdx.x;
  Packed<T, N> x[kSteps], gate[kSteps], grad[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const uint32_t access = first + k * kThreads;
    if (access >= a.accesses) break;
    const Place place(a, access, N);
    x[k] = load<N>(place.in<T>(a.x));
    gate[k] = load<N>(place.in<T>(a.gate));
    grad[k] = load<N>(place.in<T>(a.grad_y));
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const uint32_t access = first + k * kThreads;
    if (access >= a.accesses) break;
    const Place place(a, access, N);
    float dx[N], dg[N], dy[N], y[N];
    unpack(x[k], dx);
    unpack(gate[k], dg);
    unpack(grad[k], dy);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Activation activation = activate<kActivation>(dg[i]);
      y[i] = dx[i] * activation.value;
      dg[i] = dy[i] * dx[i] * activation.derivative;
      dx[i] = dy[i] * activation.value;
    }
    write(place.in<T>(a.grad_x), dx);
    write(place.in<T>(a.grad_gate), dg);
    if (a.y.data != nullptr) write(place.in<T>(a.y), y);
  }
}

/// The number of accesses, which kernels count in 32 bits.
uint32_t accesses_of(const GatedProductShape& shape, int n) {
  const int64_t accesses = shape.outer * shape.inner * (shape.width / n);
  if (accesses >= int64_t{1} << 31) {
    throw std::invalid_argument("gated_product: " + std::to_string(accesses) +
                                " accesses in one call, the CUDA kernel takes 2^31 - 1");
  }
  return static_cast<uint32_t>(accesses);
}

template <class F>
void dispatch(const GatedProductShape& shape, bool wide, Arguments& a, const F& f) {
  dispatch_access(shape.type, wide, [&](auto access) {
    constexpr int N = decltype(access)::kWidth;
    a.accesses = accesses_of(shape, N);
    a.per_row = Divisor(static_cast<uint32_t>(shape.width / N));
    a.inner = Divisor(static_cast<uint32_t>(shape.inner));
    const unsigned blocks = (a.accesses + kThreads * kSteps - 1) / (kThreads * kSteps);
    if (shape.activation == GateActivation::kSilu) {
      f(access, std::integral_constant<GateActivation, GateActivation::kSilu>(), blocks);
    } else {
      f(access, std::integral_constant<GateActivation, GateActivation::kSigmoid>(), blocks);
    }
  });
}

bool is_empty(const GatedProductShape& shape) {
  return shape.outer == 0 || shape.inner == 0 || shape.width == 0;
}

}  // namespace

void gated_product_forward(const GatedProductShape& shape, const InputRows& x,
                           const InputRows& gate, const OutputRows& y, cudaStream_t stream) {
  if (is_empty(shape)) return;
  Arguments a{};
  a.x = x;
  a.gate = gate;
  a.y = y;
  const auto fits = [&](const auto& rows) { return aligned(rows, shape.type, shape.width, 16); };
  dispatch(shape, fits(x) && fits(gate) && fits(y), a,
           [&](auto access, auto activation, unsigned blocks) {
             using T = typename decltype(access)::Type;
             launch_dependent(
                 forward_kernel<T, decltype(access)::kWidth, decltype(activation)::value>,
                 dim3(blocks), dim3(kThreads), 0, stream, a);
           });
  check_launch("gated_product_forward");
}

void gated_product_backward(const GatedProductShape& shape, const InputRows& x,
                            const InputRows& gate, const InputRows& grad_y,
                            const OutputRows& grad_x, const OutputRows& grad_gate,
                            const OutputRows& y, cudaStream_t stream) {
  if (is_empty(shape)) return;
  Arguments a{};
  a.x = x;
  a.gate = gate;
  a.grad_y = grad_y;
  a.grad_x = grad_x;
  a.grad_gate = grad_gate;
  a.y = y;
  const auto fits = [&](const auto& rows) { return aligned(rows, shape.type, shape.width, 16); };
  const bool wide =
      fits(x) && fits(gate) && fits(grad_y) && fits(grad_x) && fits(grad_gate) && fits(y);
  dispatch(shape, wide, a, [&](auto access, auto activation, unsigned blocks) {
    using T = typename decltype(access)::Type;
    backward_kernel<T, decltype(access)::kWidth, decltype(activation)::value>
        <<<blocks, kThreads, 0, stream>>>(a);
  });
  check_launch("gated_product_backward");
}

}  // namespace heddle::ops::cuda
