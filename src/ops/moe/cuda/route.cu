// Expert e of a token is held by lane e % 32. The k largest are found one after the other: each
// lane offers its own largest, the warp takes the largest of these, and its lane strikes it out.
#include <cmath>
#include <stdexcept>
#include <string>

#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/moe/cuda/route.h"

namespace heddle::ops::cuda {
namespace {

constexpr int kWarps = 4;
constexpr float kStruckOut = -1, kNotANumber = -0.5f;  // below every probability

template <class T>
__device__ __forceinline__ float as_float(T x) {
  return static_cast<float>(x);
}
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == 2) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

__device__ __forceinline__ float lane_max(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}

template <class T, int kEach>
__global__ void __launch_bounds__(kWarps * 32)
    forward_kernel(const Router r, const T* logits, const int64_t* chosen, float* probabilities,
                   int64_t* experts, T* weights) {
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (token >= r.tokens) return;
  const int lane = static_cast<int>(threadIdx.x) & 31, count = static_cast<int>(r.experts),
            k = static_cast<int>(r.top_k);
  const T* const row = logits + token * count;
  float p[kEach], largest = -INFINITY, sum = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int e = lane + 32 * j;
    p[j] = e < count ? as_float(row[e]) : -INFINITY;
    largest = fmaxf(largest, p[j]);
  }
  largest = lane_max(largest);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    p[j] = lane + 32 * j < count ? expf(p[j] - largest) : 0;
    sum += p[j];
  }
  sum = lane_sum(sum);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int e = lane + 32 * j;
    p[j] = e < count ? p[j] / sum : kStruckOut;
    if (e < count) probabilities[token * count + e] = p[j];
    if (p[j] != p[j]) p[j] = kNotANumber;
  }
  // Lane i keeps the i-th choice.
  int own = 0;
  float kept = 0;
  for (int i = 0; i < k; ++i) {
    float best = -2;
    int at = 0;
    if (chosen != nullptr) {
      at = static_cast<int>(chosen[token * k + i]);
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (at == lane + 32 * j) best = p[j];
      best = __shfl_sync(0xffffffffu, best, at & 31);
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (p[j] > best) best = p[j], at = lane + 32 * j;
      }
#pragma unroll
      for (int d = 16; d > 0; d /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, best, d);
        const int other_at = __shfl_xor_sync(0xffffffffu, at, d);
        if (other > best || (other == best && other_at < at)) best = other, at = other_at;
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (at == lane + 32 * j) p[j] = kStruckOut;
    }
    if (lane == i) own = at, kept = best == kNotANumber ? NAN : best;
  }
  const float total = r.normalize ? lane_sum(kept) : 1;
  if (lane >= k) return;
  experts[token * k + lane] = own;
  weights[token * k + lane] = from_float<T>(kept / total);
}

template <class T, int kEach>
__global__ void __launch_bounds__(kWarps * 32)
    backward_kernel(const Router r, const float* probabilities, const int64_t* experts,
                    const T* grad_weights, const float* grad_probabilities, T* grad_logits) {
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (token >= r.tokens) return;
  const int lane = static_cast<int>(threadIdx.x) & 31, count = static_cast<int>(r.experts),
            k = static_cast<int>(r.top_k);
  float p[kEach], d[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int e = lane + 32 * j;
    const int64_t at = token * count + e;
    p[j] = e < count ? probabilities[at] : 0;
    d[j] = e < count && grad_probabilities != nullptr ? grad_probabilities[at] : 0;
  }
  if (grad_weights != nullptr) {
    const int expert = lane < k ? static_cast<int>(experts[token * k + lane]) : -1;
    float grad = lane < k ? as_float(grad_weights[token * k + lane]) : 0;
    if (r.normalize) {
      const float kept = lane < k ? probabilities[token * count + expert] : 0, sum = lane_sum(kept);
      grad = (grad - lane_sum(grad * kept) / sum) / sum;
    }
    for (int i = 0; i < k; ++i) {
      const int e = __shfl_sync(0xffffffffu, expert, i);
      const float g = __shfl_sync(0xffffffffu, grad, i);
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (e == lane + 32 * j) d[j] += g;
    }
  }
  float product = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) product += d[j] * p[j];
  product = lane_sum(product);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int e = lane + 32 * j;
    if (e < count) grad_logits[token * count + e] = from_float<T>(p[j] * (d[j] - product));
  }
}

/// Calls f with T() and the experts that a lane holds as a constant.
template <class F>
void dispatch(const Router& r, const F& f) {
  if (r.experts > kMostRoutedExperts || r.top_k > kMostChosenExperts) {
    throw std::invalid_argument("router (cuda): " + std::to_string(r.top_k) + " of " +
                                std::to_string(r.experts) + " experts; it takes 32 of 1024");
  }
  const auto by_count = [&](auto type) {
    if (r.experts <= 32) return f(type, std::integral_constant<int, 1>());
    if (r.experts <= 64) return f(type, std::integral_constant<int, 2>());
    if (r.experts <= 128) return f(type, std::integral_constant<int, 4>());
    if (r.experts <= 256) return f(type, std::integral_constant<int, 8>());
    if (r.experts <= 512) return f(type, std::integral_constant<int, 16>());
    f(type, std::integral_constant<int, 32>());
  };
  if (r.type == Element::kBFloat16) {
    by_count(bf16());
  } else {
    by_count(float());
  }
}

unsigned blocks_of(const Router& r) {
  return static_cast<unsigned>((r.tokens + kWarps - 1) / kWarps);
}

}  // namespace

void route_forward(const Router& r, const void* logits, const int64_t* chosen, float* probabilities,
                   int64_t* experts, void* weights, cudaStream_t stream) {
  if (r.tokens == 0) return;
  dispatch(r, [&](auto type, auto each) {
    using T = decltype(type);
    forward_kernel<T, decltype(each)::value><<<blocks_of(r), kWarps * 32, 0, stream>>>(
        r, static_cast<const T*>(logits), chosen, probabilities, experts, static_cast<T*>(weights));
  });
  check_launch("route_forward");
}

void route_backward(const Router& r, const float* probabilities, const int64_t* experts,
                    const void* grad_weights, const float* grad_probabilities, void* grad_logits,
                    cudaStream_t stream) {
  if (r.tokens == 0) return;
  dispatch(r, [&](auto type, auto each) {
    using T = decltype(type);
    backward_kernel<T, decltype(each)::value><<<blocks_of(r), kWarps * 32, 0, stream>>>(
        r, probabilities, experts, static_cast<const T*>(grad_weights), grad_probabilities,
        static_cast<T*>(grad_logits));
  });
  check_launch("route_backward");
}

}  // namespace heddle::ops::cuda
