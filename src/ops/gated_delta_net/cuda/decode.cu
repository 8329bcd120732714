// One token of the gated delta rule for many sequences. The time is that of reading and writing the
// states once, so a CTA keeps a tile of one state, all rows of some columns, in registers, and a
// thread kRows rows of four columns, loaded before anything else. The columns of a state are
// independent: with S the state before the token and q, k of unit length,
//   u = beta (v - e^g k^T S),   S' = e^g S + k u,   o = e^g q^T S + (q . k) u,
// so that one pass over the registers gives k^T S and q^T S, a sum over the warps u and o, and a
// second pass the new state. Sums have a fixed order.
//
// The mixer's kernel does the convolution of the head's channels before the rule, and the gates,
// and the norm after it. One CTA takes a key head and its value heads one after another, because
// the inputs of the convolution are shifted in place. Intermediate values are rounded to bf16 where
// the separate kernels write them.
//
// On-chip memory of a CTA: q, k (and v) of the head, and sums of 8 warps, 2 x 8 floats a column.
#include "ops/gated_delta_net/cuda/decode.h"

#include <stdexcept>
#include <string>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/ptx.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/gated_delta_net/cuda/decode_state.cuh"

namespace heddle::ops::cuda {
namespace {

using namespace gdn_step;

/// Columns of a CTA that computes the rule alone: few, so that one sequence occupies many
/// multiprocessors, and always as many, so that a sequence's bits do not depend on the batch.
constexpr int kTile = 32;

struct RuleArguments {
  GdnDecodeShape shape;
  GdnDecodeInputs in;
  bf16* o;
};

/// One tile of columns of one value head of one sequence.
template <int K>
__global__ void __launch_bounds__(kThreads) rule_kernel(const __grid_constant__ RuleArguments p) {
  using T = Tile<K, kTile>;
  __shared__ Shared<K, kTile> shared;
  const int column = blockIdx.x * kTile, head = blockIdx.y, row = blockIdx.z;
  const int key_head = head / (p.shape.v_heads / p.shape.k_heads);
  const int64_t gate = static_cast<int64_t>(row) * p.shape.v_heads + head;
  StateTile<K, kTile> state(p.in.states + (p.in.slots[row] * p.shape.v_heads + head) * K * K,
                            column, static_cast<int>(threadIdx.x));
  const bf16* q = static_cast<const bf16*>(p.in.q.data) + row * p.in.q.outer_stride + key_head * K;
  const bf16* k = static_cast<const bf16*>(p.in.k.data) + row * p.in.k.outer_stride + key_head * K;
  for (int i = threadIdx.x; i < K; i += kThreads) {
    shared.q[i] = __bfloat162float(q[i]);
    shared.k[i] = __bfloat162float(k[i]);
  }
  float v[4];
  const int own = column + threadIdx.x % T::kLanes * 4;
  read(static_cast<const bf16*>(p.in.v.data) + row * p.in.v.outer_stride + head * K + own, v);
  const float decay = __expf(p.in.g[gate]), beta = p.in.beta[gate];
  __syncthreads();
  const Factors f = factors<K>(shared.q, shared.k, p.in.normalize_qk, p.in.scale);
  state.step(
      shared, f, decay, beta, v, [] { __syncthreads(); },
      [&](const float4& o) {
        if (threadIdx.x >= T::kLanes) return;
        const float out[4] = {o.x, o.y, o.z, o.w};
        write(p.o + gate * K + own, out);
      });
}

struct MixerArguments {
  GdnDecodeShape shape;
  GdnMixerInputs in;
  bf16* y;
};

/// log(1 + e^x); from 20 on the two sides agree to fp32.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

__device__ __forceinline__ float value_of(const void* data, Element type, int64_t index) {
  float value[1];
  read_weight(data, type, index, value);
  return value[0];
}

__device__ __forceinline__ float rounded(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

/// The convolution and SiLU of one channel, whose last inputs are shifted.
__device__ __forceinline__ float convolved(const GdnMixerInputs& in, int row, int64_t slot,
                                           int channels, int channel) {
  const int kept = in.width - 1;
  bf16* history = static_cast<bf16*>(in.conv_states) + (slot * channels + channel) * kept;
  const bf16 now = static_cast<const bf16*>(in.qkv.data)[row * in.qkv.outer_stride + channel];
  const int64_t first = static_cast<int64_t>(channel) * in.width;
  float c;
  if (in.width == 4) {  // all loads before anything waits for one
    const bf16 before[3] = {history[0], history[1], history[2]};
    float taps[4];
    read_weight(in.conv_weight, in.conv_weight_type, first, taps);
    c = taps[3] * __bfloat162float(now);
#pragma unroll
    for (int w = 0; w < 3; ++w) c += taps[w] * __bfloat162float(before[w]);
    history[0] = before[1];
    history[1] = before[2];
  } else {
    c = value_of(in.conv_weight, in.conv_weight_type, first + kept) * __bfloat162float(now);
    for (int w = 0; w < kept; ++w) {
      const bf16 before = history[w];
      c += value_of(in.conv_weight, in.conv_weight_type, first + w) * __bfloat162float(before);
      if (w > 0) history[w - 1] = before;
    }
  }
  history[kept - 1] = now;
  return rounded(c * sigmoid(c));
}

/// kThreads threads that do the steps of key heads and their value heads, one after another.
template <int K, class Sync>
struct Mixer {
  using T = Tile<K, K>;
  const MixerArguments& p;
  Shared<K, K>& shared;
  float (&values)[K];
  int thread;
  Sync sync;

  /// Value head h of a key head of a sequence, whose state is where state() says; done() is called
  /// when the new one is there.
  template <class State, class Done>
  __device__ __forceinline__ void step(int row, int key_head, int h, const State& state_of,
                                       const Done& done) {
    const GdnMixerInputs& in = p.in;
    const int group = p.shape.v_heads / p.shape.k_heads, key_dim = p.shape.k_heads * K,
              channels = 2 * key_dim + p.shape.v_heads * K, head = key_head * group + h;
    const int64_t slot = in.slots[row];
    const int own = thread % T::kLanes * 4;
    // On their way while the convolution waits for its own.
    const bf16 a = static_cast<const bf16*>(in.a.data)[row * in.a.outer_stride + head],
               b = static_cast<const bf16*>(in.b.data)[row * in.b.outer_stride + head];
    const float a_log = value_of(in.a_log, in.a_log_type, head),
                bias = value_of(in.dt_bias, in.dt_bias_type, head);
    const Packed<bf16, 4> gates = load<4>(static_cast<const bf16*>(in.z.data) +
                                          row * in.z.outer_stride + head * in.z.inner_stride + own);
    // q, k and the first head's v side by side.
    for (int i = thread; i < (h == 0 ? 3 * K : K); i += kThreads) {
      const int part = h == 0 ? i / K : 2, at = i % K;
      const int channel =
          part == 2 ? 2 * key_dim + head * K + at : part * key_dim + key_head * K + at;
      const float y = convolved(in, row, slot, channels, channel);
      (part == 0 ? shared.q : part == 1 ? shared.k : values)[at] = y;
    }
    const float rate = -expf(a_log), decay = __expf(rate * softplus(__bfloat162float(a) + bias)),
                beta = sigmoid(__bfloat162float(b));
    sync();
    const Factors f = factors<K>(shared.q, shared.k, true, in.scale);
    const float v[4] = {values[own], values[own + 1], values[own + 2], values[own + 3]};
    auto state = state_of();
    float4 step;
    state.step(shared, f, decay, beta, v, sync, [&](const float4& o) { step = o; });
    done();
    if (thread < T::kLanes) {
      float o[4] = {rounded(step.x), rounded(step.y), rounded(step.z), rounded(step.w)};
      float square = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) square += o[c] * o[c];
      constexpr unsigned kMask = T::kLanes == 32 ? 0xffffffffu : (1u << T::kLanes) - 1;
#pragma unroll
      for (int distance = T::kLanes / 2; distance > 0; distance /= 2)
        square += __shfl_xor_sync(kMask, square, distance);
      const float rstd = rsqrtf(square / K + in.eps);
      float weight[4], gate[4];
      read_weight(in.norm_weight, in.norm_weight_type, own, weight);
      unpack(gates, gate);
#pragma unroll
      for (int c = 0; c < 4; ++c) o[c] = weight[c] * (o[c] * rstd) * (gate[c] * sigmoid(gate[c]));
      write(p.y + (static_cast<int64_t>(row) * p.shape.v_heads + head) * K + own, o);
    }
    sync();
  }
};

template <int K>
__device__ __forceinline__ float* state_of(const MixerArguments& p, int row, int head) {
  return p.in.states + (p.in.slots[row] * p.shape.v_heads + head) * int64_t{K} * K;
}

/// One key head of one sequence, and its value heads.
template <int K>
__global__ void __launch_bounds__(kThreads, 2)
    mixer_kernel(const __grid_constant__ MixerArguments p) {
  __shared__ Shared<K, K> shared;
  __shared__ float values[K];
  const int key_head = blockIdx.x, row = blockIdx.y, thread = threadIdx.x,
            group = p.shape.v_heads / p.shape.k_heads;
  const auto sync = [] { __syncthreads(); };
  Mixer<K, decltype(sync)> mixer{p, shared, values, thread, sync};
  let_next_begin();
  wait_for_previous();
  for (int h = 0; h < group; ++h) {
    const StateTile<K, K> state(state_of<K>(p, row, key_head * group + h), 0, thread);
    mixer.step(
        row, key_head, h, [&] { return state; }, [] {});
  }
}

/// Groups of kThreads threads, each with a warp that copies its states.
constexpr int kGroups = 3, kStreamThreads = kGroups * (kThreads + 32);

template <int K>
struct StreamShared {
  alignas(128) float states[kGroups][K * K];
  Shared<K, K> shared[kGroups];
  float values[kGroups][K];
  u64 loaded[kGroups], done[kGroups];
};

/// Many key heads: each group of a multiprocessor takes one of a sequence after another. Its states
/// come and go by bulk copies through its place of shared memory, while it does what a step needs
/// before and after its state, and other groups work on theirs: the memory is always busy.
template <int K>
__global__ void __launch_bounds__(kStreamThreads, 1)
    mixer_stream_kernel(const __grid_constant__ MixerArguments p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  StreamShared<K>& own = *reinterpret_cast<StreamShared<K>*>(memory);
  const bool copies = threadIdx.x >= kGroups * kThreads;
  const int which = copies ? (static_cast<int>(threadIdx.x) - kGroups * kThreads) / 32
                           : static_cast<int>(threadIdx.x) / kThreads,
            heads = p.shape.v_heads / p.shape.k_heads, all = p.shape.k_heads * p.shape.batch,
            first = which * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x),
            stride = kGroups * static_cast<int>(gridDim.x);
  const u32 loaded = smem_u32(&own.loaded[which]), done = smem_u32(&own.done[which]);
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int g = 0; g < kGroups; ++g) {
      mbar_init(smem_u32(&own.loaded[g]), 1);
      mbar_init(smem_u32(&own.done[g]), kWarps);
    }
    fence_async_proxy();
  }
  __syncthreads();
  if (copies) {
    if (threadIdx.x % 32 > 0) return;
    constexpr u32 kBytes = K * K * 4;
    const u32 place = smem_u32(own.states[which]);
    bool has_waited = false;
    int phase = 0;
    for (int i = first; i < all; i += stride) {
      for (int h = 0; h < heads; ++h, phase ^= 1) {
        float* const state = state_of<K>(p, i / p.shape.k_heads, i % p.shape.k_heads * heads + h);
        bulk_wait_read<0>();
        mbar_expect(loaded, kBytes);
        bulk_load(place, state, kBytes, loaded);
        // The state was written by an earlier step: no launch of this recording did it.
        if (!has_waited) wait_for_previous();
        has_waited = true;
        mbar_wait(done, phase);
        bulk_store(state, place, kBytes);
        bulk_commit();
      }
    }
    bulk_wait_all();
    return;
  }
  const int thread = threadIdx.x % kThreads;
  const auto sync = [which] { named_sync(1 + which, kThreads); };
  Mixer<K, decltype(sync)> mixer{p, own.shared[which], own.values[which], thread, sync};
  int phase = 0;
  wait_for_previous();
  for (int i = first; i < all; i += stride) {
    for (int h = 0; h < heads; ++h, phase ^= 1) {
      mixer.step(
          i / p.shape.k_heads, i % p.shape.k_heads, h,
          [&] {
            mbar_wait(loaded, phase);
            return StateTile<K, K, false>(own.states[which], 0, thread);
          },
          [&] {
            fence_async_proxy();
            __syncwarp();
            if (thread % 32 == 0) mbar_arrive(done);
          });
    }
  }
#endif
}

[[noreturn]] void refuse_dim(int head_dim) {
  throw std::invalid_argument("gated_delta_rule_decode: head dimension " +
                              std::to_string(head_dim) + ", the CUDA kernel has no such case");
}

}  // namespace

void gated_delta_rule_decode(const GdnDecodeShape& shape, const GdnDecodeInputs& in, void* o,
                             cudaStream_t stream) {
  if (shape.batch == 0) return;
  const RuleArguments p{shape, in, static_cast<bf16*>(o)};
  const dim3 grid(static_cast<unsigned>(shape.head_dim / kTile),
                  static_cast<unsigned>(shape.v_heads), static_cast<unsigned>(shape.batch));
  switch (shape.head_dim) {
    case 64:
      rule_kernel<64><<<grid, kThreads, 0, stream>>>(p);
      break;
    case 128:
      rule_kernel<128><<<grid, kThreads, 0, stream>>>(p);
      break;
    case 256:
      rule_kernel<256><<<grid, kThreads, 0, stream>>>(p);
      break;
    default:
      refuse_dim(shape.head_dim);
  }
  check_launch("gated_delta_rule_decode");
}

void gated_delta_net_decode(const GdnDecodeShape& shape, const GdnMixerInputs& in, void* y,
                            cudaStream_t stream) {
  if (shape.batch == 0) return;
  const MixerArguments p{shape, in, static_cast<bf16*>(y)};
  const dim3 grid(static_cast<unsigned>(shape.k_heads), static_cast<unsigned>(shape.batch));
  // More than two of the other kernel's CTAs a multiprocessor.
  if (shape.head_dim == 128 && shape.k_heads * shape.batch > 2 * multiprocessors() && has_sm90a()) {
    constexpr int kBytes = sizeof(StreamShared<128>);
    cudaFuncSetAttribute(mixer_stream_kernel<128>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         kBytes);
    launch_dependent(mixer_stream_kernel<128>, dim3(static_cast<unsigned>(multiprocessors())),
                     dim3(kStreamThreads), kBytes, stream, p);
    check_launch("gated_delta_net_decode");
    return;
  }
  switch (shape.head_dim) {
    case 64:
      launch_dependent(mixer_kernel<64>, grid, dim3(kThreads), 0, stream, p);
      break;
    case 128:
      launch_dependent(mixer_kernel<128>, grid, dim3(kThreads), 0, stream, p);
      break;
    default:
      refuse_dim(shape.head_dim);
  }
  check_launch("gated_delta_net_decode");
}

}  // namespace heddle::ops::cuda
