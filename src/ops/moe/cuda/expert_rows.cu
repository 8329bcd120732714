// Rows of thousands of bytes are moved by accesses of 16 bytes, several of them in flight a thread,
// or, to all places of a token, by the copy engine through shared memory; the backward of SwiGLU
// gives a row to a warp, which then holds the sum that is the gradient of the row's weight.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/moe/cuda/expert_rows.h"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 256, kSteps = 4, kWidth = 8;  // elements of an access
constexpr int kWarps = kThreads / 32;
constexpr int kSlots = 4;    // rows of a CTA that sends
constexpr int kSenders = 8;  // CTAs of a multiprocessor that send
constexpr int64_t kMostSlotBytes = 227 * 1024 / kSenders - 1024;  // beside what a CTA takes itself
using Packed8 = Packed<bf16, kWidth>;

/// Accesses of `rows` rows, which kernels count in 32 bits, and CTAs that take `each` of them.
struct Grid {
  uint32_t accesses, blocks;
  Divisor per_row;

  Grid(int64_t rows, int64_t width, int each) : accesses(0), blocks(0) {
    const int64_t total = rows * (width / kWidth);
    if (width % kWidth != 0 || total >= int64_t{1} << 31) {
      throw std::invalid_argument(
          "rows of experts: " + std::to_string(rows) + " rows of " + std::to_string(width) +
          " elements, the CUDA kernel takes multiples of 8 and 2^34 in all");
    }
    accesses = static_cast<uint32_t>(total);
    blocks = static_cast<uint32_t>((total + each - 1) / each);
    per_row = Divisor(static_cast<uint32_t>(width / kWidth));
  }
};

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const Grid grid, const Divisor k, const bf16* x, const int64_t* source,
                  bf16* rows) {
  const uint32_t first = blockIdx.x * (kThreads * kSteps) + threadIdx.x;
  Packed8 value[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const uint32_t access = first + i * kThreads;
    if (access >= grid.accesses) break;
    const uint32_t row = grid.per_row.divide(access), column = access - row * grid.per_row.value;
    const uint32_t token = k.divide(static_cast<uint32_t>(source[row]));
    value[i] = load<kWidth>(x + (int64_t{token} * grid.per_row.value + column) * kWidth);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const uint32_t access = first + i * kThreads;
    if (access >= grid.accesses) break;
    store(rows + int64_t{access} * kWidth, value[i]);
  }
}

/// One thread a CTA, which takes every gridDim.x-th token: kSlots rows are on their way in or out,
/// half of them each.
__global__ void __launch_bounds__(32)
    send_kernel(uint32_t tokens, int64_t count, uint32_t bytes, int k, const unsigned char* x,
                const int64_t* place, unsigned char* rows) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) u64 barriers[kSlots];
  if (threadIdx.x != 0) return;
  const u32 slots = smem_u32(memory), landed = smem_u32(barriers);
  for (int s = 0; s < kSlots; ++s) mbar_init(landed + s * 8, 1);
  fence_async_proxy();
  const auto fetch = [&](uint32_t token, int slot) {
    if (token >= tokens) return;
    mbar_expect(landed + slot * 8, bytes);
    bulk_load(slots + slot * bytes, x + int64_t{token} * bytes, bytes, landed + slot * 8);
  };
  constexpr int kAhead = kSlots / 2;
  for (int s = 0; s < kAhead; ++s) fetch(blockIdx.x + s * gridDim.x, s);
  int slot = 0, phase = 0;
  for (uint32_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    mbar_wait(landed + slot * 8, phase);
    for (int j = 0; j < k; ++j) {
      const int64_t to = place[int64_t{token} * k + j];
      if (to < count) bulk_store(rows + to * bytes, slots + slot * bytes, bytes);
    }
    bulk_commit();
    // The slot that comes free is that of kSlots - kAhead tokens ago.
    bulk_wait_read<kSlots - kAhead - 1>();
    fetch(token + kAhead * gridDim.x, (slot + kAhead) % kSlots);
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
  bulk_wait_all();
#endif
}

__global__ void __launch_bounds__(kThreads)
    sum_kernel(const Grid grid, int64_t count, int k, const bf16* rows, const int64_t* place,
               const bf16* start, bf16* y) {
  const uint32_t access = blockIdx.x * kThreads + threadIdx.x;
  if (access >= grid.accesses) return;
  const uint32_t token = grid.per_row.divide(access), column = access - token * grid.per_row.value;
  const int64_t* places = place + int64_t{token} * k;
  float total[kWidth] = {};
  Packed8 first;
  if (start != nullptr) first = load<kWidth>(start + int64_t{access} * kWidth);
  for (int begin = 0; begin < k; begin += kSteps) {
    Packed8 value[kSteps];
    bool is_row[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int64_t at = begin + i < k ? places[begin + i] : count;
      is_row[i] = at < count;
      if (is_row[i]) value[i] = load<kWidth>(rows + (at * grid.per_row.value + column) * kWidth);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (!is_row[i]) continue;
      float x[kWidth];
      unpack(value[i], x);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) total[e] += x[e];
    }
  }
  if (start != nullptr) {
    float x[kWidth];
    unpack(first, x);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) total[e] += x[e];
  }
  write(y + int64_t{access} * kWidth, total);
}

__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(const Grid grid, const bf16* gate_up, const bf16* weights, const int64_t* source,
                  bf16* hidden) {
  const uint32_t access = blockIdx.x * kThreads + threadIdx.x;
  if (access >= grid.accesses) return;
  const uint32_t per_row = grid.per_row.value, row = grid.per_row.divide(access);
  const int64_t at =
      (int64_t{row} * per_row + access) * kWidth;  // rows of gate_up are twice as long
  const Packed8 gates = load<kWidth>(gate_up + at);
  const Packed8 ups = load<kWidth>(gate_up + at + int64_t{per_row} * kWidth);
  const float weight = __bfloat162float(weights[source[row]]);
  float g[kWidth], u[kWidth];
  unpack(gates, g);
  unpack(ups, u);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) u[e] *= weight * g[e] * sigmoid(g[e]);
  write(hidden + int64_t{access} * kWidth, u);
}

__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(uint32_t count, uint32_t per_row, const bf16* gate_up,
                           const bf16* grad_hidden, const bf16* weights, const int64_t* source,
                           bf16* grad_gate_up, bf16* hidden, bf16* grad_weights) {
  const uint32_t row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= count) return;
  const int64_t assignment = source[row], up = int64_t{per_row} * kWidth;
  const float weight = __bfloat162float(weights[assignment]);
  float sum = 0;  // of grad_hidden * silu(gate) * up
  for (uint32_t column = lane; column < per_row; column += 32) {
    const int64_t at = (int64_t{row} * per_row + column) * kWidth, at_gate = at + row * up;
    float g[kWidth], u[kWidth], d[kWidth], h[kWidth];
    const Packed8 gates = load<kWidth>(gate_up + at_gate),
                  ups = load<kWidth>(gate_up + at_gate + up),
                  grads = load<kWidth>(grad_hidden + at);
    unpack(gates, g);
    unpack(ups, u);
    unpack(grads, d);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const float s = sigmoid(g[e]), silu = g[e] * s;
      sum += d[e] * silu * u[e];
      h[e] = weight * silu * u[e];
      const float grad = weight * d[e];
      d[e] = grad * silu;
      u[e] = grad * u[e] * s * (1.f + g[e] * (1.f - s));
    }
    write(grad_gate_up + at_gate, u);
    write(grad_gate_up + at_gate + up, d);
    if (hidden != nullptr) write(hidden + at, h);
  }
  sum = lane_sum(sum);
  if (lane == 0) grad_weights[assignment] = __float2bfloat16_rn(sum);
}

}  // namespace

void gather_expert_rows(int64_t count, int64_t width, int64_t k, const void* x,
                        const int64_t* source, void* rows, cudaStream_t stream) {
  if (count == 0) return;
  const Grid grid(count, width, kThreads * kSteps);
  gather_kernel<<<grid.blocks, kThreads, 0, stream>>>(grid, Divisor(static_cast<uint32_t>(k)),
                                                      static_cast<const bf16*>(x), source,
                                                      static_cast<bf16*>(rows));
  check_launch("gather_expert_rows");
}

bool can_send_rows(int64_t width) { return has_sm90a() && kSlots * width * 2 <= kMostSlotBytes; }

void send_expert_rows(int64_t count, int64_t tokens, int64_t width, int64_t k, const void* x,
                      const int64_t* place, void* rows, cudaStream_t stream) {
  if (count == 0) return;
  const Grid grid(count, width, kThreads);  // for its checks of the sizes
  const auto bytes = static_cast<uint32_t>(width * 2);
  const int64_t senders = std::min<int64_t>(tokens, int64_t{multiprocessors()} * kSenders);
  send_kernel<<<static_cast<unsigned>(senders), 32, kSlots * bytes, stream>>>(
      static_cast<uint32_t>(tokens), count, bytes, static_cast<int>(k),
      static_cast<const unsigned char*>(x), place, static_cast<unsigned char*>(rows));
  check_launch("send_expert_rows");
}

void sum_expert_rows(int64_t count, int64_t tokens, int64_t width, int64_t k, const void* rows,
                     const int64_t* place, const void* start, void* y, cudaStream_t stream) {
  if (tokens == 0) return;
  const Grid grid(tokens, width, kThreads);
  sum_kernel<<<grid.blocks, kThreads, 0, stream>>>(
      grid, count, static_cast<int>(k), static_cast<const bf16*>(rows), place,
      static_cast<const bf16*>(start), static_cast<bf16*>(y));
  check_launch("sum_expert_rows");
}

void weighted_swiglu_forward(int64_t count, int64_t width, const void* gate_up, const void* weights,
                             const int64_t* source, void* hidden, cudaStream_t stream) {
  if (count == 0) return;
  const Grid grid(count, width, kThreads);
  swiglu_kernel<<<grid.blocks, kThreads, 0, stream>>>(grid, static_cast<const bf16*>(gate_up),
                                                      static_cast<const bf16*>(weights), source,
                                                      static_cast<bf16*>(hidden));
  check_launch("weighted_swiglu_forward");
}

void weighted_swiglu_backward(int64_t count, int64_t width, const void* gate_up,
                              const void* grad_hidden, const void* weights, const int64_t* source,
                              void* grad_gate_up, void* hidden, void* grad_weights,
                              cudaStream_t stream) {
  if (count == 0) return;
  const Grid grid(count, width, kThreads);  // for its checks of the sizes
  swiglu_backward_kernel<<<static_cast<unsigned>((count + kWarps - 1) / kWarps), kThreads, 0,
                           stream>>>(
      static_cast<uint32_t>(count), grid.per_row.value, static_cast<const bf16*>(gate_up),
      static_cast<const bf16*>(grad_hidden), static_cast<const bf16*>(weights), source,
      static_cast<bf16*>(grad_gate_up), static_cast<bf16*>(hidden),
      static_cast<bf16*>(grad_weights));
  check_launch("weighted_swiglu_backward");
}

}  // namespace heddle::ops::cuda
