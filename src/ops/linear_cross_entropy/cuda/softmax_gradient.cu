// Clusters of up to eight CTAs walk over the rows of logits; each CTA takes its part of a row,
// which is read once and written once.
//
//   landing buffer (shared, 62 KB at 248320 bf16 logits)  a part, by one bulk copy
//   registers, 32 or 64 a thread                          the part's logits, as they lie in memory
//
// Once all warps have their logits in registers the buffer takes the next row, so that it is read
// beside the exponentials, the exchange and the stores of this one; two CTAs share a
// multiprocessor. A warp finds the maximum and the sums of its logits and stores them into the
// shared memory of all CTAs of the cluster (st.async, which the receiver's barrier counts): the one
// meeting of a row.
//
//   full        bytes of the landing buffer          empty  one arrival a warp: it may be written
//   met[2]      bytes of all warps' sums, by turns: a warp sends those of row r + 2 only after all
//               warps have sent those of r + 1, and so have read those of r
//
// Where the row is longer than that, is not aligned, or the device has no clusters (before sm_90),
// one CTA passes over the row twice.
#include "ops/linear_cross_entropy/cuda/softmax_gradient.h"

#include <algorithm>

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kLargestCluster = 8;
/// Logits that a thread of a cluster holds in registers, and a CTA.
constexpr int kHeld = 64, kLargestPart = kThreads * kHeld;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kLowest = -3.0e38f;

struct Arguments {
  int64_t rows, vocabulary;
  int part;  // logits of one CTA of the cluster
  void* logits;
  SoftmaxGradientRows rows_of;
};

/// exp2_fast is one instruction, whose error is far below that of a bf16 logit.
/// Of logits x in units of log 2: their maximum, the sum of 2^(x - maximum), and that of
/// 2^(x - maximum) * (maximum - x), whose terms are not negative either: nothing cancels.
struct Partial {
  float maximum, sum, depth;

  __device__ void add(float x) {
    const float below = x - maximum, e = exp2_fast(below);
    sum += e;
    depth -= e * below;
  }
  /// Sums below a larger maximum.
  __device__ Partial beneath(float larger) const {
    // 2^-1000 is 0 in fp32. The bound keeps a sum over nothing, whose maximum is kLowest, finite.
    const float rise = fminf(larger - maximum, 1000.f), factor = exp2_fast(-rise);
    return {larger, sum * factor, (depth + rise * sum) * factor};
  }
};

/// Over the lanes of a warp, in every lane.
template <class F>
__device__ __forceinline__ float over_warp(float value, const F& f) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = f(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}
__device__ __forceinline__ float warp_maximum(float value) {
  return over_warp(value, [](float a, float b) { return fmaxf(a, b); });
}
__device__ __forceinline__ float warp_sum(float value) {
  return over_warp(value, [](float a, float b) { return a + b; });
}

/// One value of each warp.
using PerWarp = float[kWarps];
struct Scratch {
  PerWarp maximum[1], totals[2];
};

/// K reductions over the CTA at once, in every thread.
template <int K, class F>
__device__ __forceinline__ void block_reduce(float (&values)[K], PerWarp (&scratch)[K],
                                             const F& f) {
#pragma unroll
  for (float& value : values) value = over_warp(value, f);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (threadIdx.x % 32 == 0) scratch[k][threadIdx.x / 32] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) {
    // As many values as warps, read twice by the 32 lanes: the same order in every warp.
    values[k] = scratch[k][threadIdx.x % kWarps];
#pragma unroll
    for (int distance = kWarps / 2; distance > 0; distance /= 2) {
      values[k] = f(values[k], __shfl_xor_sync(0xffffffffu, values[k], distance));
    }
  }
}

__device__ __forceinline__ float block_maximum(float value, Scratch& scratch) {
  float values[1] = {value};
  block_reduce(values, scratch.maximum, [](float a, float b) { return fmaxf(a, b); });
  return values[0];
}

/// The sums of all threads, which have the same maximum.
__device__ __forceinline__ Partial block_total(const Partial& partial, Scratch& scratch) {
  float values[2] = {partial.sum, partial.depth};
  block_reduce(values, scratch.totals, [](float a, float b) { return a + b; });
  return {partial.maximum, values[0], values[1]};
}

/// Data for a row's gradient: factor * (probability - one_hot(label)).
struct Row {
  int64_t label;
  float factor;      // gradient_scale * weight; 0 where the label is ignored
  float normalizer;  // log2 of the sum of exponentials

  __device__ float probability(float logit) const { return exp2_fast(logit * kLog2e - normalizer); }
  __device__ float logprob(float logit) const { return logit - normalizer * kLn2; }
};

__device__ __forceinline__ float weight_of(const Arguments& a, int64_t row) {
  return a.rows_of.loss_weights != nullptr ? a.rows_of.loss_weights[row] : 1.f;
}

__device__ __forceinline__ Row row_of(const Arguments& a, int64_t label, float weight,
                                      const Partial& whole) {
  return {label, label < 0 ? 0.f : weight * a.rows_of.gradient_scale,
          whole.maximum + log2f(whole.sum)};
}

/// logsumexp - sum of p x, both relative to the maximum.
__device__ __forceinline__ float entropy_of(const Row& row, const Partial& whole) {
  const float entropy = kLn2 * (log2f(whole.sum) + whole.depth / whole.sum);
  // Where one logit dominates, the rounding of its product with log2(e) is left; NaN stays NaN.
  return row.label < 0 || entropy < 0 ? 0.f : entropy;
}

/// All of a row but the log-probability of a label within the vocabulary.
__device__ __forceinline__ void write_statistics(const Arguments& a, int64_t row, const Row& info,
                                                 const Partial& whole) {
  if (info.label < 0) a.rows_of.logprobs[row] = 0;
  if (info.label >= a.vocabulary) a.rows_of.logprobs[row] = __int_as_float(0x7fc00000);
  if (a.rows_of.entropies != nullptr) a.rows_of.entropies[row] = entropy_of(info, whole);
}

/// Memory that the CTAs of a cluster share besides the landing buffer.
struct Meeting {
  float4 sums[2][kLargestCluster * kWarps];  // of every warp of the cluster: Partial
  u64 full, empty, met[2];
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // clusters

__device__ __forceinline__ u32 cluster_register(int which) {
  u32 rank, ranks;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\nmov.u32 %1, %%cluster_nctarank;"
               : "=r"(rank), "=r"(ranks));
  return which == 0 ? rank : ranks;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
/// Stores 16 bytes at an address of this CTA's shared memory into that of CTA `rank`, whose barrier
/// at the address `bar` counts them.
__device__ __forceinline__ void store_into(int rank, u32 address, const Partial& value, u32 bar) {
  asm volatile(
      "{.reg .b32 a, b;\nmapa.shared::cluster.u32 a, %0, %2;\nmapa.shared::cluster.u32 b, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [a], {%3, %4, %5, %5}, [b];}" ::
          "r"(address),
      "r"(bar), "r"(rank), "f"(value.maximum), "f"(value.sum), "f"(value.depth)
      : "memory");
}
/// mbar_wait for what other CTAs of the cluster have stored.
__device__ __forceinline__ void wait_for_cluster(u32 bar, int phase) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(bar),
      "r"(phase)
      : "memory");
}

/// The sums of all warps of the cluster, in every lane.
__device__ __forceinline__ Partial whole_of(const float4* sums, int count) {
  constexpr int kEach = kLargestCluster * kWarps / 32;
  Partial parts[kEach];
  float maximum = kLowest;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = static_cast<int>(threadIdx.x % 32) + 32 * i;
    const float4 part = at < count ? sums[at] : make_float4(kLowest, 0, 0, 0);
    parts[i] = {part.x, part.y, part.z};
    maximum = fmaxf(maximum, part.x);
  }
  Partial whole{warp_maximum(maximum), 0, 0};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const Partial part = parts[i].beneath(whole.maximum);
    whole.sum += part.sum;
    whole.depth += part.depth;
  }
  return {whole.maximum, warp_sum(whole.sum), warp_sum(whole.depth)};
}

template <class T, int N>
__device__ __forceinline__ float maximum_of(const Packed<T, N>& packed) {
  if constexpr (sizeof(T) == 2) {
    u32 two = packed.words[0];
#pragma unroll
    for (int i = 1; i < N / 2; ++i)
      asm("max.bf16x2 %0, %0, %1;" : "+r"(two) : "r"(packed.words[i]));
    return fmaxf(bf16_lo(two), bf16_hi(two));
  } else {
    float maximum = __uint_as_float(packed.words[0]);
#pragma unroll
    for (int i = 1; i < N; ++i) maximum = fmaxf(maximum, __uint_as_float(packed.words[i]));
    return maximum;
  }
}
#endif

/// Persistent; a CTA's part of each row of its cluster.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 2 : 1)
    held_kernel(const __grid_constant__ Arguments a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char memory[];
  const T* landing = reinterpret_cast<const T*>(memory);
  __shared__ Meeting meeting;
  constexpr int kAccesses = kHeld / N, kStep = kThreads * N;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int rank = cluster_register(0), ranks = cluster_register(1);
  const int64_t first = blockIdx.x / ranks, clusters = gridDim.x / ranks;
  const int begin = rank * a.part;
  const int count = max(0, min(a.part, static_cast<int>(a.vocabulary) - begin));
  const u32 full = smem_u32(&meeting.full), empty = smem_u32(&meeting.empty);
  const auto start_load = [&](int64_t row) {
    const u32 bytes = count * static_cast<u32>(sizeof(T));
    mbar_expect(full, bytes);
    if (bytes > 0) {
      bulk_load(smem_u32(landing), static_cast<const T*>(a.logits) + row * a.vocabulary + begin,
                bytes, full);
    }
  };
  if (thread == 0) {
    mbar_init(full, 1);
    mbar_init(empty, kWarps);
    for (u64& met : meeting.met) mbar_init(smem_u32(&met), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_proxy();
    start_load(first);
  }
  cluster_sync();

  int turn = 0;
  for (int64_t row = first; row < a.rows; row += clusters, ++turn) {
    const int slot = turn % 2;
    const u32 met = smem_u32(&meeting.met[slot]);
    if (thread == 0) mbar_expect(met, ranks * kWarps * sizeof(float4));
    const int64_t label_of_row = a.rows_of.labels[row];
    const float weight = weight_of(a, row);

    mbar_wait(full, turn % 2);
    Packed<T, N> held[kAccesses];
    Partial partial{kLowest, 0, 0};
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      const int i = k * kStep + thread * N;
      if (i < count) held[k] = load<N>(landing + i);
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(empty);
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      if (k * kStep + thread * N < count)
        partial.maximum = fmaxf(partial.maximum, maximum_of<T, N>(held[k]));
    }
    partial.maximum = warp_maximum(partial.maximum) * kLog2e;
    if (thread == 0 && row + clusters < a.rows) {
      mbar_wait(empty, turn % 2);
      start_load(row + clusters);
    }
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      if (k * kStep + thread * N < count) {
        float x[N];
        unpack(held[k], x);
#pragma unroll
        for (int n = 0; n < N; ++n) partial.add(x[n] * kLog2e);
      }
    }
    partial.sum = warp_sum(partial.sum);
    partial.depth = warp_sum(partial.depth);
    if (lane < ranks) {
      store_into(lane, smem_u32(&meeting.sums[slot][rank * kWarps + warp]), partial, met);
    }
    wait_for_cluster(met, turn / 2 % 2);
    const Partial whole = whole_of(meeting.sums[slot], ranks * kWarps);

    const Row info = row_of(a, label_of_row, weight, whole);
    if (rank == 0 && thread == 0) write_statistics(a, row, info, whole);
    const int label =
        info.label >= 0 && info.label < a.vocabulary ? static_cast<int>(info.label) - begin : -1;
    T* const part = static_cast<T*>(a.logits) + row * a.vocabulary + begin;
#pragma unroll
    for (int k = 0; k < kAccesses; ++k) {
      const int i = k * kStep + thread * N;
      if (i >= count) continue;
      float x[N];
      unpack(held[k], x);
      const bool has_label = label >= i && label < i + N;
      if (has_label) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if (i + n == label) a.rows_of.logprobs[row] = info.logprob(x[n]);
        }
      }
      if (!a.rows_of.want_gradient) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) x[n] = info.factor * info.probability(x[n]);
      if (has_label) {
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] -= i + n == label ? info.factor : 0.f;
      }
      write(part + i, x);
    }
  }
  // No CTA ends while another may store into it.
  cluster_sync();
#endif
}

/// One row per CTA, read twice.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) streamed_kernel(const __grid_constant__ Arguments a) {
  __shared__ Scratch scratch;
  constexpr int64_t kStep = kThreads * N;
  const int64_t row = blockIdx.x;
  T* logits = static_cast<T*>(a.logits) + row * a.vocabulary;
  Partial partial{kLowest, 0, 0};
#pragma unroll 4
  for (int64_t i = threadIdx.x * N; i < a.vocabulary; i += kStep) {
    float x[N];
    read(logits + i, x);
    float maximum = partial.maximum;
#pragma unroll
    for (int n = 0; n < N; ++n) maximum = fmaxf(maximum, x[n] * kLog2e);
    partial = partial.beneath(maximum);
#pragma unroll
    for (int n = 0; n < N; ++n) partial.add(x[n] * kLog2e);
  }
  const float maximum = block_maximum(partial.maximum, scratch);
  const Partial whole = block_total(partial.beneath(maximum), scratch);
  const Row info = row_of(a, a.rows_of.labels[row], weight_of(a, row), whole);
  if (threadIdx.x == 0) {
    write_statistics(a, row, info, whole);
    if (info.label >= 0 && info.label < a.vocabulary) {
      float logit[1];
      read(logits + info.label, logit);
      a.rows_of.logprobs[row] = info.logprob(logit[0]);
    }
  }
  if (!a.rows_of.want_gradient) return;
  __syncthreads();  // that logit is read
#pragma unroll 4
  for (int64_t i = threadIdx.x * N; i < a.vocabulary; i += kStep) {
    float x[N];
    read(logits + i, x);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      x[n] = info.factor * (info.probability(x[n]) - (i + n == info.label ? 1.f : 0.f));
    }
    write(logits + i, x);
  }
}

/// CTAs of a row's cluster and the logits of each; 0 CTAs where the row cannot be held.
struct Split {
  int ranks = 0, part = 0;
};

Split split_of(int64_t vocabulary, Element type) {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      major < 9) {
    return {};
  }
  const int64_t n = 16 / bytes_of(type);
  const auto part_of = [&](int ranks) { return (vocabulary / n + ranks - 1) / ranks * n; };
  // A store into another CTA wants two of them, though one had little to do.
  int ranks = 2;
  while (ranks < kLargestCluster && part_of(ranks) > kLargestPart) ranks *= 2;
  if (part_of(ranks) > kLargestPart) return {};
  return {ranks, static_cast<int>(part_of(ranks))};
}

/// Whether the code that this device runs has the kernel's body: a build without code for sm_90 or
/// later leaves it empty, and a later device would run that.
template <class T, int N>
bool has_held_kernel() {
  static const bool has_body = [] {
    cudaFuncAttributes attributes{};
    return cudaFuncGetAttributes(&attributes, held_kernel<T, N>) == cudaSuccess &&
           attributes.ptxVersion >= 90;
  }();
  return has_body;
}

template <class T, int N>
void launch_held(Arguments a, const Split& split, cudaStream_t stream) {
  a.part = split.part;
  const int bytes = split.part * static_cast<int>(sizeof(T));
  cudaFuncSetAttribute(held_kernel<T, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(split.ranks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(split.ranks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  // All at once: rows are dealt out in turn, and a cluster that had to wait would double the time.
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, held_kernel<T, N>, &config) != cudaSuccess)
    clusters = 1;
  config.gridDim.x *= static_cast<unsigned>(std::clamp<int64_t>(a.rows, 1, std::max(1, clusters)));
  cudaLaunchKernelEx(&config, held_kernel<T, N>, a);
}

}  // namespace

void softmax_gradient(const SoftmaxGradientShape& shape, void* logits,
                      const SoftmaxGradientRows& rows, cudaStream_t stream) {
  if (shape.rows == 0 || shape.vocabulary == 0) return;
  const Arguments a{shape.rows, shape.vocabulary, 0, logits, rows};
  const bool wide =
      aligned(InputRows{logits, shape.vocabulary, 0}, shape.type, shape.vocabulary, 16);
  const Split split = wide ? split_of(shape.vocabulary, shape.type) : Split{};
  dispatch_access(shape.type, wide, [&](auto access) {
    using T = typename decltype(access)::Type;
    constexpr int N = decltype(access)::kWidth;
    if constexpr (N > 1) {
      if (split.ranks > 0 && has_held_kernel<T, N>()) return launch_held<T, N>(a, split, stream);
    }
    streamed_kernel<T, N><<<static_cast<unsigned>(shape.rows), kThreads, 0, stream>>>(a);
  });
  check_launch("softmax_gradient");
}

}  // namespace heddle::ops::cuda
