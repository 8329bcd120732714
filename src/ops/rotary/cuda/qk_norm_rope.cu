// A group of lanes (a warp at 256 bf16 elements) takes a token and walks over its heads, one head
// in registers at a time: the token's angles and the weight stay in registers too. The other half
// of a rotated pair sits in another lane and comes by a shuffle. The next head's loads are issued
// before this head is worked on.
#include "ops/rotary/cuda/qk_norm_rope.h"

#include <algorithm>

#include "ops/cuda/column_sum.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/lanes.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = kLaneRowThreads;

struct Arguments {
  uint32_t tokens, heads, width, half;
  Element weight_type;
  float eps, offset;
  InputRows x, grad_y;
  OutputRows grad_x;
  const void* weight;
  const float *cos, *sin;
  void* y;
  float* rstd;
  float* partial;
};

/// The elements of a head that a lane holds, kVectors accesses of N, and what belongs to them.
template <class T, int N, int kLanes, int kVectors>
struct Lane {
  // One access each: the partners of a lane's elements are all in one other lane. Otherwise they
  // are read again.
  static constexpr bool kShuffles = kVectors == 1 && N > 1;

  const Arguments& a;
  uint32_t first;                                      // element of access 0
  float weight[kVectors][N];                           // offset + weight
  float cos[kVectors][N] = {}, sin[kVectors][N] = {};  // of this token; sin carries the sign

  __device__ explicit Lane(const Arguments& arguments)
      : a(arguments), first(threadIdx.x % kLanes * N) {
    each([&](int v, uint32_t i) {
      read_weight(a.weight, a.weight_type, i, weight[v]);
#pragma unroll
      for (int j = 0; j < N; ++j) weight[v][j] += a.offset;
    });
  }

  /// f(v, i) for the accesses inside the head; i: their first element.
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t i = first + v * (kLanes * N);
      if (i < a.width) f(v, i);
    }
  }

  __device__ __forceinline__ bool rotates(uint32_t i) const { return i < 2 * a.half; }
  __device__ __forceinline__ uint32_t partner(uint32_t i) const {
    return i < a.half ? i + a.half : i - a.half;
  }

  /// out = own * cos + partner * sin turns forward; elements that are not rotated have cos 1, sin
  /// 0.
  __device__ __forceinline__ void read_angles(uint32_t token) {
    const int64_t row = static_cast<int64_t>(token) * a.half;
    each([&](int v, uint32_t i) {
      const uint32_t angle = i < a.half ? i : i - a.half;
      if (rotates(i)) {
        read_weight(a.cos, Element::kFloat32, row + angle, cos[v]);
        read_weight(a.sin, Element::kFloat32, row + angle, sin[v]);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        cos[v][j] = rotates(i) ? cos[v][j] : 1.f;
        sin[v][j] = rotates(i) ? (i < a.half ? -sin[v][j] : sin[v][j]) : 0.f;
      }
    });
  }

  /// Turns the elements; `reread(i, values)` gives partners where they do not come by a shuffle.
  /// Every lane of the warp takes part.
  template <class F>
  __device__ __forceinline__ void turn(float (&values)[kVectors][N], float direction,
                                       const F& reread) const {
    if constexpr (kShuffles) {
      const uint32_t source = rotates(first) ? partner(first) / N : first / N;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float other = __shfl_sync(0xffffffffu, values[0][j], source, kLanes);
        values[0][j] = values[0][j] * cos[0][j] + direction * sin[0][j] * other;
      }
    } else {
      each([&](int v, uint32_t i) {
        if (!rotates(i)) return;
        float other[N];
        reread(partner(i), other);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          values[v][j] = values[v][j] * cos[v][j] + direction * sin[v][j] * other[j];
        }
      });
    }
  }
};

/// The place of one head, walked over head by head and token by token.
struct Walk {
  uint32_t token, head = 0;

  /// On to the next head, or to the first of the token `stride` further on.
  __device__ __forceinline__ void advance(const Arguments& a, uint32_t stride) {
    if (++head == a.heads) head = 0, token += stride;
  }
  template <class Pointer>
  __device__ __forceinline__ int64_t offset(const Rows<Pointer>& rows) const {
    return token * rows.outer_stride + head * rows.inner_stride;
  }
};

template <class T, int N, int kLanes, int kVectors>
__global__ void __launch_bounds__(kThreads, kVectors* N <= 8 ? 4 : 1)
    forward_kernel(const __grid_constant__ Arguments a) {
  constexpr uint32_t kGroups = kThreads / kLanes;
  Lane<T, N, kLanes, kVectors> lane(a);
  let_next_begin();
  wait_for_previous();
  const uint32_t stride = gridDim.x * kGroups;
  const float scale = 1.f / static_cast<float>(a.width);
  const T* x = static_cast<const T*>(a.x.data);
  Packed<T, N> next[kVectors] = {};
  const auto fetch = [&](const Walk& at) {
    if (at.token >= a.tokens) return;
    const T* head = x + at.offset(a.x);
    lane.each([&](int v, uint32_t i) { next[v] = load<N>(head + i); });
  };
  Walk ahead{blockIdx.x * kGroups + threadIdx.x / kLanes};
  fetch(ahead);
  // Whole warps stay together: every lane takes part in sums and shuffles.
  for (uint32_t first = blockIdx.x * kGroups; first < a.tokens; first += stride) {
    const uint32_t token = first + threadIdx.x / kLanes;
    const bool active = token < a.tokens;
    if (active) lane.read_angles(token);
    for (uint32_t h = 0; h < a.heads; ++h) {
      float n[kVectors][N] = {};
      lane.each([&](int v, uint32_t) { unpack(next[v], n[v]); });
      ahead.advance(a, stride);
      fetch(ahead);
      float square = 0;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int j = 0; j < N; ++j) square += n[v][j] * n[v][j];
      }
      const float rstd = rsqrtf(lane_sum<kLanes>(square) * scale + a.eps);
      lane.each([&](int v, uint32_t) {
#pragma unroll
        for (int j = 0; j < N; ++j) n[v][j] *= rstd * lane.weight[v][j];
      });
      const T* head = x + Walk{active ? token : 0, h}.offset(a.x);
      lane.turn(n, 1.f, [&](uint32_t i, float(&other)[N]) {
        float w[N];
        read(head + i, other);
        read_weight(a.weight, a.weight_type, i, w);
#pragma unroll
        for (int j = 0; j < N; ++j) other[j] *= rstd * (a.offset + w[j]);
      });
      if (!active) continue;
      const int64_t row = static_cast<int64_t>(token) * a.heads + h;
      if (lane.first == 0) a.rstd[row] = rstd;
      lane.each([&](int v, uint32_t i) { write(static_cast<T*>(a.y) + row * a.width + i, n[v]); });
    }
  }
}

template <class T, int N, int kLanes, int kVectors>
__global__ void __launch_bounds__(kThreads, kVectors* N <= 8 ? 3 : 1)
    backward_kernel(const __grid_constant__ Arguments a) {
  constexpr uint32_t kGroups = kThreads / kLanes;
  Lane<T, N, kLanes, kVectors> lane(a);
  const uint32_t stride = gridDim.x * kGroups;
  const float scale = 1.f / static_cast<float>(a.width);
  const T* x = static_cast<const T*>(a.x.data);
  const T* dy = static_cast<const T*>(a.grad_y.data);
  float dw[kVectors][N] = {};
  Packed<T, N> next_x[kVectors] = {}, next_dy[kVectors] = {};
  float next_rstd = 0;
  const auto fetch = [&](const Walk& at) {
    if (at.token >= a.tokens) return;
    const T *x_head = x + at.offset(a.x), *dy_head = dy + at.offset(a.grad_y);
    lane.each([&](int v, uint32_t i) {
      next_x[v] = load<N>(x_head + i);
      next_dy[v] = load<N>(dy_head + i);
    });
    next_rstd = a.rstd[static_cast<int64_t>(at.token) * a.heads + at.head];
  };
  Walk ahead{blockIdx.x * kGroups + threadIdx.x / kLanes};
  fetch(ahead);
  for (uint32_t first = blockIdx.x * kGroups; first < a.tokens; first += stride) {
    const uint32_t token = first + threadIdx.x / kLanes;
    const bool active = token < a.tokens;
    if (active) lane.read_angles(token);
    for (uint32_t h = 0; h < a.heads; ++h) {
      // n: the normalised x before the weight; dn: the gradient with respect to it.
      float n[kVectors][N] = {}, dn[kVectors][N] = {}, dot = 0;
      lane.each([&](int v, uint32_t) {
        unpack(next_x[v], n[v]);
        unpack(next_dy[v], dn[v]);
      });
      const float rstd = next_rstd;
      ahead.advance(a, stride);
      fetch(ahead);
      const T* dy_head = dy + Walk{active ? token : 0, h}.offset(a.grad_y);
      lane.turn(dn, -1.f, [&](uint32_t i, float(&other)[N]) { read(dy_head + i, other); });
      if (active) {
        lane.each([&](int v, uint32_t) {
#pragma unroll
          for (int j = 0; j < N; ++j) {
            n[v][j] *= rstd;
            dw[v][j] += dn[v][j] * n[v][j];
            dn[v][j] *= lane.weight[v][j];
            dot += dn[v][j] * n[v][j];
          }
        });
      }
      const float mean = lane_sum<kLanes>(dot) * scale;
      if (!active) continue;
      T* dx = static_cast<T*>(a.grad_x.data) + Walk{token, h}.offset(a.grad_x);
      lane.each([&](int v, uint32_t i) {
#pragma unroll
        for (int j = 0; j < N; ++j) dn[v][j] = rstd * (dn[v][j] - n[v][j] * mean);
        write(dx + i, dn[v]);
      });
    }
  }
  if (a.partial == nullptr) return;
  store_column_sums<N, kLanes, kVectors>(dw, a.width,
                                         a.partial + static_cast<int64_t>(blockIdx.x) * a.width);
}

int64_t rows_of(const QkNormRopeShape& shape) { return shape.tokens * shape.heads; }

int64_t backward_blocks(const QkNormRopeShape& shape) {
  // A warp and more per token in every case; as many CTAs as fit at once.
  return lane_row_blocks(shape.tokens / (kThreads / 32), multiprocessors() * int64_t{3});
}

Arguments arguments_of(const QkNormRopeShape& shape, const InputRows& x, const void* weight,
                       const float* cos, const float* sin) {
  Arguments a{};
  a.tokens = static_cast<uint32_t>(shape.tokens);
  a.heads = static_cast<uint32_t>(shape.heads);
  a.width = static_cast<uint32_t>(shape.width);
  a.half = static_cast<uint32_t>(shape.half);
  a.weight_type = shape.weight_type;
  a.offset = shape.offset;
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
          (shape.tokens * kLanes + kThreads - 1) / kThreads, multiprocessors() * int64_t{4}));
      launch_dependent(forward_kernel<T, N, kLanes, kVectors>, dim3(blocks), dim3(kThreads), 0,
                       stream, a);
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
  a.partial = grad_weight != nullptr ? workspace : nullptr;
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
  if (grad_weight != nullptr)
    column_sum(workspace, blocks, shape.width, grad_weight, shape.weight_type, stream);
}

}  // namespace heddle::ops::cuda
