#include "ops/optimizer_step/cuda/adamw_eight_bit.h"

#include <stdexcept>
#include <string>

#include "ops/optimizer_step/cuda/adamw_scalars.cuh"
#include "ops/optimizer_step/cuda/elements.cuh"
#include "ops/optimizer_step/cuda/tensor_table.cuh"
#include "ops/optimizer_step/eight_bit.h"
#include "ops/optimizer_step/rounding.h"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
static_assert(32 * kVector == eight_bit::kBlock, "a warp has a block of codes");

using Table = TensorTable<AdamwEightBitTensor, kWarps * 32 * kVector>;

struct alignas(8) Codes {
  std::uint8_t x[kVector];
};

__device__ float power_of_2(int exponent) {
  return __uint_as_float(static_cast<unsigned>(127 + exponent) << 23);
}

/// eight_bit::decoded without loops.
__device__ float decoded(int code, int bits) {
  if (code == 0) return 0;
  const int range = 31 - __clz(code), k = code - (1 << range) + 1;
  return power_of_2(3 * (range - bits + 1)) *
         (0.125F + 0.875F * static_cast<float>(k) * power_of_2(-range));
}

__device__ float steps_of(float x, int range, int bits) {
  const float of_top = x * power_of_2(3 * (bits - 1 - range));
  if (range == 0) return of_top;
  return (of_top - 0.125F) * (static_cast<float>(1 << range) / 0.875F);
}

/// eight_bit::encoded without loops.
__device__ int encoded(float x, float random, int bits, bool keeps_nonzero) {
  // floor(log8 x): the exponents of 2 in threes, from 126 = 3 * 42 below 1 on.
  const int exponent = static_cast<int>(__float_as_uint(x) >> 23) - 127;
  const int range = min(max((exponent + 126) / 3 - 42 + bits, 0), bits - 1), most = 1 << range;
  int k = static_cast<int>(steps_of(x, range, bits) + random);
  k = min(k, most);
  if (range == 0 && keeps_nonzero && x > 0) k = 1;
  return most - 1 + k;
}

__device__ float largest_of_warp(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}

/// A warp updates a block of codes, each thread 8 neighbours in registers.
__global__ void __launch_bounds__(kThreads)
    adamw_eight_bit_kernel(const __grid_constant__ Table table,
                           const __grid_constant__ AdamwScalars scalars) {
  using eight_bit::kMomentBits;
  using eight_bit::kRootBits;
  const AdamwFloats s(scalars);
  if (s.changes_nothing) return;
  const auto place = table.place();
  const AdamwEightBitTensor& t = table.entries[place.tensor];
  const std::int64_t i = place.begin + threadIdx.x * kVector;
  if (i >= t.count) return;  // whole warps: count is a multiple of a block
  const std::int64_t block = i / eight_bit::kBlock;
  const float decay = s.decay(t.weight_decay);
  const std::uint64_t key = rounding_key_of_step(t.rounding_key, s.step);
  float p[kVector], g[kVector], m[kVector], root[kVector];
  load(t.parameter, t.parameter_is_float, i, p);
  load(t.gradient, t.gradient_is_float, i, g);
  Codes m8 = *reinterpret_cast<const Codes*>(t.exp_avg + i);
  Codes v8 = *reinterpret_cast<const Codes*>(t.exp_avg_sq + i);
  const float old_m = t.exp_avg_scale[block], old_root = t.exp_avg_sq_scale[block];
  float largest_m = 0, largest_root = 0;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float gradient = g[j] * s.gradient_multiplier;
    const int code = m8.x[j];
    m[j] = decoded(code & 127, kMomentBits) * old_m;
    if (code >= 128) m[j] = -m[j];
    const float old = decoded(v8.x[j], kRootBits) * old_root;
    p[j] *= decay;
    m[j] += (1 - s.beta1) * (gradient - m[j]);
    root[j] = sqrtf(old * old * s.beta2 + (1 - s.beta2) * gradient * gradient);
    p[j] -= s.step_size * m[j] / (root[j] * s.inverse_root_correction2 + s.eps);
    largest_m = fmaxf(largest_m, fabsf(m[j]));
    largest_root = fmaxf(largest_root, root[j]);
  }
  largest_m = largest_of_warp(largest_m), largest_root = largest_of_warp(largest_root);
  const float by_m = largest_m > 0 ? largest_m : 1, by_root = largest_root > 0 ? largest_root : 1;
  Bf16Vector p16;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const std::uint64_t bits = rounding_bits(key, static_cast<std::uint64_t>(i + j));
    const auto uniform = [&](int shift) {
      return static_cast<float>(static_cast<unsigned>(bits >> shift) & 0xffffu) * 0x1p-16F;
    };
    p16.x[j] = rounded(p[j], static_cast<std::uint32_t>(bits));
    const int code = encoded(fabsf(m[j]) / by_m, uniform(16), kMomentBits, false);
    m8.x[j] = static_cast<std::uint8_t>(code + (m[j] < 0 ? 128 : 0));
    v8.x[j] = static_cast<std::uint8_t>(encoded(root[j] / by_root, uniform(32), kRootBits, true));
  }
  if (t.parameter_is_float) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(t.parameter) + i);
    to[0] = {p[0], p[1], p[2], p[3]}, to[1] = {p[4], p[5], p[6], p[7]};
  } else {
    *reinterpret_cast<Bf16Vector*>(static_cast<__nv_bfloat16*>(t.parameter) + i) = p16;
  }
  *reinterpret_cast<Codes*>(t.exp_avg + i) = m8;
  *reinterpret_cast<Codes*>(t.exp_avg_sq + i) = v8;
  if (threadIdx.x % 32 == 0) {
    t.exp_avg_scale[block] = largest_m;
    t.exp_avg_sq_scale[block] = largest_root;
  }
}

}  // namespace

void adamw_eight_bit(const std::vector<AdamwEightBitTensor>& tensors, const AdamwScalars& scalars,
                     cudaStream_t stream) {
  Table::for_each(tensors, [&](const Table& table, int blocks) {
    adamw_eight_bit_kernel<<<blocks, kThreads, 0, stream>>>(table, scalars);
  });
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("adamw_eight_bit: ") + cudaGetErrorString(error));
}

}  // namespace heddle::ops::cuda
