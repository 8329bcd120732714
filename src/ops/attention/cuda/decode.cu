// Attention of one new token in each of many sequences, over a cache of keys and values
// ("flash-decoding"). The time is that of reading keys and values once, so one CTA takes kSplit
// keys of one KV head for all query heads that read it, and a second kernel joins the parts. How a
// sequence is cut depends on its length alone: its bits do not depend on the batch. Sums have a
// fixed order.
//
// A key is kLanes neighbouring lanes with 16 bytes each, a warp takes 32 / kLanes keys at once, and
// the next kAhead of them are on their way while it computes. A lane keeps its 8 elements of the
// queries and of the outputs of up to kHeads query heads in registers. Further query heads of a KV
// head have CTAs of their own, which find the keys in the second level of cache.
//
// Keys lie in pages; the table of a sequence says where each page is.
//
// The new token's key and value are read where the projection left them; the CTA whose keys they
// are among also writes them into the cache, which nobody reads there in this launch.
//
// On-chip memory of a CTA: the outputs of its 8 warps, 8 x kHeads x head_dim floats.
#include "ops/attention/cuda/decode.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kSplit = 128;  // keys of a CTA
constexpr int kAhead = 2;    // keys that a group of lanes computes with at once
constexpr int kMostHeads = 4;

struct Arguments {
  AttentionDecodeShape shape;
  AttentionDecodeInputs in;
  int splits, tiles;  // tiles: of the query heads of a KV head
  int page_shift;     // log2 of the tokens of a page
  float* parts;       // [batch,heads,splits,head_dim], not yet divided
  float2* sums;       // [batch,heads,splits]: largest score in units of log 2, sum of exponentials
  bf16* o;
};

/// The largest score of some keys, the sum of their exponentials relative to it, and the sum of
/// their values with these weights.
template <int kHeads>
struct Running {
  float largest[kHeads], sum[kHeads], o[kHeads][8];
};

/// Takes in what another group of lanes, or warp, has.
__device__ __forceinline__ void join(float& largest, float& sum, float (&o)[8], float other_largest,
                                     float other_sum, const float (&other)[8]) {
  const float most = fmaxf(largest, other_largest);
  // Neither has a key: both weights are of nothing.
  const float own = largest == -INFINITY ? 0.f : exp2f(largest - most),
              theirs = other_largest == -INFINITY ? 0.f : exp2f(other_largest - most);
  largest = most;
  sum = sum * own + other_sum * theirs;
#pragma unroll
  for (int i = 0; i < 8; ++i) o[i] = o[i] * own + other[i] * theirs;
}

template <int D, int kHeads>
__global__ void __launch_bounds__(kThreads, 2) split_kernel(const __grid_constant__ Arguments a) {
  constexpr int kLanes = D / 8, kKeys = 32 / kLanes;  // keys of a warp at once
  __shared__ float outputs[kWarps][kHeads][D];
  __shared__ float2 weights[kWarps][kHeads];
  const int row = blockIdx.z, kv_head = blockIdx.y / a.tiles, tile = blockIdx.y % a.tiles;
  let_next_begin();
  wait_for_previous();
  const int64_t before = a.in.lengths[row];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSplit;
  if (first > before) return;
  const int count = static_cast<int>(min(static_cast<int64_t>(kSplit), before + 1 - first));
  const int group = a.shape.heads / a.shape.kv_heads;
  const int head = kv_head * group + tile * kHeads, heads = min(kHeads, group - tile * kHeads);
  const int warp = threadIdx.x / 32, key_of_warp = threadIdx.x % 32 / kLanes,
            element = threadIdx.x % kLanes * 8;

  Running<kHeads> run;
  float q[kHeads][8];
  const bf16* const queries = static_cast<const bf16*>(a.in.q.data) + row * a.in.q.outer_stride +
                              static_cast<int64_t>(head) * D + element;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    run.largest[h] = -INFINITY, run.sum[h] = 0;
    if (h < heads) read(queries + h * D, q[h]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      run.o[h][i] = 0;
      // exp2 of scores in units of log 2 is exp of the scores.
      q[h][i] = h < heads ? q[h][i] * a.in.scale * 1.4426950408889634f : 0.f;
    }
  }

  const int64_t stride = static_cast<int64_t>(a.shape.kv_heads) * D;
  bf16* const keys = static_cast<bf16*>(a.in.k_cache) + kv_head * D + element;
  bf16* const values = static_cast<bf16*>(a.in.v_cache) + kv_head * D + element;
  const int* const pages = a.in.pages + static_cast<int64_t>(row) * a.shape.pages;
  // Where a key of this part lies in the caches.
  const auto place_of = [&](int key) {
    const int64_t token = first + key;
    const int64_t page = __ldg(pages + (token >> a.page_shift));
    return ((page << a.page_shift) + (token & (a.shape.page_tokens - 1))) * stride;
  };
  const bf16* const new_key =
      static_cast<const bf16*>(a.in.k.data) + row * a.in.k.outer_stride + kv_head * D + element;
  const bf16* const new_value =
      static_cast<const bf16*>(a.in.v.data) + row * a.in.v.outer_stride + kv_head * D + element;
  // Keys in the cache, and the place of the new one; past the part if a later CTA has it.
  const int cached = static_cast<int>(min(before - first, static_cast<int64_t>(kSplit)));
  const int newest = cached < kSplit ? cached : -1;

  constexpr int kStep = kWarps * kKeys;
  Packed<bf16, 8> k[kAhead], v[kAhead];
  const auto fetch = [&](int base) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int key = base + n * kStep + key_of_warp;
      if (key < cached) {
        const int64_t place = place_of(key);
        k[n] = load<8>(keys + place);
        v[n] = load<8>(values + place);
      } else if (key == newest) {
        k[n] = load<8>(new_key);
        v[n] = load<8>(new_value);
        if (tile == 0) {
          const int64_t place = place_of(key);
          store(keys + place, k[n]);
          store(values + place, v[n]);
        }
      } else {
        k[n] = {}, v[n] = {};
      }
    }
  };
  fetch(warp * kKeys);
  for (int base = warp * kKeys; base < count; base += kStep * kAhead) {
    Packed<bf16, 8> now_k[kAhead], now_v[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) now_k[n] = k[n], now_v[n] = v[n];
    fetch(base + kStep * kAhead);
    float scores[kAhead][kHeads];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      float key[8];
      unpack(now_k[n], key);
      const bool is_seen = base + n * kStep + key_of_warp < count;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float s = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) s += q[h][i] * key[i];
        s = lane_sum<kLanes>(s);
        scores[n][h] = is_seen ? s : -INFINITY;
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float most = run.largest[h];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) most = fmaxf(most, scores[n][h]);
      // A group of lanes may have seen no key yet.
      const float base_score = most == -INFINITY ? 0.f : most;
      const float kept = exp2f(run.largest[h] - base_score);
      run.largest[h] = most;
      run.sum[h] *= kept;
#pragma unroll
      for (int i = 0; i < 8; ++i) run.o[h][i] *= kept;
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        scores[n][h] = exp2f(scores[n][h] - base_score);
        run.sum[h] += scores[n][h];
      }
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      float value[8];
      unpack(now_v[n], value);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < 8; ++i) run.o[h][i] += scores[n][h] * value[i];
      }
    }
  }

  // The groups of lanes of a warp, then the warps.
#pragma unroll
  for (int distance = kLanes; distance < 32; distance *= 2) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float other[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) other[i] = __shfl_xor_sync(0xffffffffu, run.o[h][i], distance);
      const float largest = __shfl_xor_sync(0xffffffffu, run.largest[h], distance),
                  sum = __shfl_xor_sync(0xffffffffu, run.sum[h], distance);
      join(run.largest[h], run.sum[h], run.o[h], largest, sum, other);
    }
  }
  if (key_of_warp == 0) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float4* const out = reinterpret_cast<float4*>(&outputs[warp][h][element]);
      out[0] = make_float4(run.o[h][0], run.o[h][1], run.o[h][2], run.o[h][3]);
      out[1] = make_float4(run.o[h][4], run.o[h][5], run.o[h][6], run.o[h][7]);
      if (element == 0) weights[warp][h] = make_float2(run.largest[h], run.sum[h]);
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < heads * D; at += kThreads) {
    const int h = at / D, d = at % D;
    float most = -INFINITY, sum = 0, o = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, weights[w][h].x);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2f(weights[w][h].x - most);
      sum += weights[w][h].y * weight;
      o += outputs[w][h][d] * weight;
    }
    const int64_t query = static_cast<int64_t>(row) * a.shape.heads + head + h;
    if (a.splits == 1) {
      a.o[query * D + d] = __float2bfloat16_rn(o / sum);
    } else {
      const int64_t part = query * a.splits + blockIdx.x;
      a.parts[part * D + d] = o;
      if (d == 0) a.sums[part] = make_float2(most, sum);
    }
  }
}

/// A CTA of D threads joins the parts of one query head.
template <int D>
__global__ void __launch_bounds__(D) join_kernel(const __grid_constant__ Arguments a) {
  let_next_begin();
  wait_for_previous();
  const int64_t query = static_cast<int64_t>(blockIdx.y) * a.shape.heads + blockIdx.x;
  const int splits = static_cast<int>(a.in.lengths[blockIdx.y] / kSplit) + 1;
  const float2* const sums = a.sums + query * a.splits;
  const float* const parts = a.parts + query * a.splits * D + threadIdx.x;
  float most = -INFINITY, sum = 0, o = 0;
  for (int s = 0; s < splits; ++s) most = fmaxf(most, sums[s].x);
#pragma unroll 4
  for (int s = 0; s < splits; ++s) {
    const float weight = exp2f(sums[s].x - most);
    sum += sums[s].y * weight;
    o += parts[s * D] * weight;
  }
  a.o[query * D + threadIdx.x] = __float2bfloat16_rn(o / sum);
}

int splits_of(const AttentionDecodeShape& shape) {
  return static_cast<int>(shape.longest / kSplit) + 1;
}

template <int D>
void launch(Arguments a, cudaStream_t stream) {
  const int group = a.shape.heads / a.shape.kv_heads;
  const auto split = [&](auto kernel, int heads) {
    a.tiles = (group + heads - 1) / heads;
    const dim3 grid(static_cast<unsigned>(a.splits),
                    static_cast<unsigned>(a.shape.kv_heads * a.tiles),
                    static_cast<unsigned>(a.shape.batch));
    launch_dependent(kernel, grid, dim3(kThreads), 0, stream, a);
  };
  if (group == 1) {
    split(split_kernel<D, 1>, 1);
  } else if (group == 2) {
    split(split_kernel<D, 2>, 2);
  } else {
    split(split_kernel<D, kMostHeads>, kMostHeads);
  }
  check_launch("attention_decode");
  if (a.splits == 1) return;
  launch_dependent(join_kernel<D>,
                   dim3(static_cast<unsigned>(a.shape.heads), static_cast<unsigned>(a.shape.batch)),
                   dim3(D), 0, stream, a);
  check_launch("attention_decode: joining the parts");
}

}  // namespace

int64_t attention_decode_workspace(const AttentionDecodeShape& shape) {
  const int splits = splits_of(shape);
  return splits == 1
             ? 0
             : static_cast<int64_t>(shape.batch) * shape.heads * splits * (shape.head_dim + 2);
}

void attention_decode(const AttentionDecodeShape& shape, const AttentionDecodeInputs& in, void* o,
                      float* workspace, cudaStream_t stream) {
  if (shape.batch == 0) return;
  Arguments a{};
  a.shape = shape;
  a.in = in;
  a.splits = splits_of(shape);
  while (1 << a.page_shift < shape.page_tokens) ++a.page_shift;
  a.sums = reinterpret_cast<float2*>(workspace);
  a.parts = workspace + 2 * static_cast<int64_t>(shape.batch) * shape.heads * a.splits;
  a.o = static_cast<bf16*>(o);
  switch (shape.head_dim) {
    case 64:
      return launch<64>(a, stream);
    case 128:
      return launch<128>(a, stream);
    case 256:
      return launch<256>(a, stream);
    default:
      throw std::invalid_argument("attention_decode: head dimension " +
                                  std::to_string(shape.head_dim) +
                                  ", the CUDA kernel takes 64, 128 and 256");
  }
}

}  // namespace heddle::ops::cuda
