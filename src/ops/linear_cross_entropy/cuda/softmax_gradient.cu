// A row of logits is spread over a cluster of up to eight CTAs and stays in their shared memory: it
// is read once and written once. Each CTA finds the maximum and the sums of its part; one exchange
// through distributed shared memory joins them. The sum for the entropy is one more multiply-add
// beside each exponential, whose unit is what that pass waits for. At 248320 bf16 logits a CTA
// holds 62 KB, and three clusters share the multiprocessors, so that one loads while another
// writes.
//
// Where the row is too long for that, is not aligned, or the device has no clusters (before sm_90),
// one CTA passes over the row twice.
#include "ops/linear_cross_entropy/cuda/softmax_gradient.h"

#include <cooperative_groups.h>
#include <cuda_pipeline.h>

#include <algorithm>

#include "ops/cuda/reduce.cuh"
#include "ops/cuda/vector.cuh"

namespace heddle::ops::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kLargestCluster = 8;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kLowest = -3.0e38f;

struct Arguments {
  int64_t vocabulary;
  int part;  // logits of one CTA of the cluster
  void* logits;
  SoftmaxGradientRows rows;
};

/// 2^x for x <= 0, one instruction; its error is far below that of a bf16 logit.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Of logits x in units of log 2: their maximum, the sum of 2^(x - maximum), and that of
/// 2^(x - maximum) * (maximum - x), whose terms are not negative either: nothing cancels.
struct Partial {
  float maximum, sum, depth;

  __device__ void add(float x) {
    const float below = x - maximum, e = fast_exp2(below);
    sum += e;
    depth -= e * below;
  }
  /// The same sums beneath a larger maximum.
  __device__ Partial beneath(float larger) const {
    // 2^-1000 is 0 in fp32. The bound keeps a sum over nothing, whose maximum is kLowest, finite.
    const float rise = fminf(larger - maximum, 1000.f), factor = fast_exp2(-rise);
    return {larger, sum * factor, (depth + rise * sum) * factor};
  }
};

[[maybe_unused]] __device__ __forceinline__ Partial join(const Partial& a, const Partial& b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  const Partial x = a.beneath(maximum), y = b.beneath(maximum);
  return {maximum, x.sum + y.sum, x.depth + y.depth};
}

/// One value of each of kThreads / 32 warps.
using PerWarp = float[kThreads / 32];
struct Scratch {
  PerWarp maximum[1], totals[2];
};

/// K reductions over the CTA at once, in every thread.
template <int K, class F>
__device__ __forceinline__ void block_reduce(float (&values)[K], PerWarp (&scratch)[K],
                                             const F& f) {
#pragma unroll
  for (float& value : values) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      value = f(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (threadIdx.x % 32 == 0) scratch[k][threadIdx.x / 32] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) {
    // kThreads / 32 values, read twice by the 32 lanes: the same order in every warp.
    values[k] = scratch[k][threadIdx.x % (kThreads / 32)];
#pragma unroll
    for (int distance = kThreads / 64; distance > 0; distance /= 2) {
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

/// What a row's gradient needs: factor * (probability - one_hot(label)).
struct Row {
  int64_t label;
  float factor;      // gradient_scale * weight; 0 where the label is ignored
  float normalizer;  // log2 of the sum of exponentials

  __device__ float probability(float logit) const { return fast_exp2(logit * kLog2e - normalizer); }
};

__device__ __forceinline__ Row row_of(const Arguments& a, int64_t row, const Partial& whole) {
  const int64_t label = a.rows.labels[row];
  const float weight = a.rows.loss_weights != nullptr ? a.rows.loss_weights[row] : 1.f;
  return {label, label < 0 ? 0.f : weight * a.rows.gradient_scale,
          whole.maximum + log2f(whole.sum)};
}

__device__ __forceinline__ float logprob_of(const Arguments& a, const Row& row, float label_logit) {
  if (row.label < 0) return 0.f;
  if (row.label >= a.vocabulary) return __int_as_float(0x7fc00000);
  return label_logit - row.normalizer * kLn2;
}

/// logsumexp - sum of p x, both relative to the maximum.
__device__ __forceinline__ float entropy_of(const Row& row, const Partial& whole) {
  const float entropy = kLn2 * (log2f(whole.sum) + whole.depth / whole.sum);
  // Where one logit dominates, the rounding of its product with log2(e) is left; NaN stays NaN.
  return row.label < 0 || entropy < 0 ? 0.f : entropy;
}

__device__ __forceinline__ void write_statistics(const Arguments& a, int64_t row, const Row& info,
                                                 const Partial& whole, float label_logit) {
  a.rows.logprobs[row] = logprob_of(a, info, label_logit);
  if (a.rows.entropies != nullptr) a.rows.entropies[row] = entropy_of(info, whole);
}

/// The logit of the label, read before anything is overwritten.
template <class T>
__device__ __forceinline__ float label_logit(const Arguments& a, int64_t row, const T* logits) {
  const int64_t label = a.rows.labels[row];
  float value[1] = {0};
  if (label >= 0 && label < a.vocabulary) read(logits + label, value);
  return value[0];
}

/// One row per cluster.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) held_kernel(const __grid_constant__ Arguments a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // clusters
  namespace cg = cooperative_groups;
  const cg::cluster_group cluster = cg::this_cluster();
  extern __shared__ __align__(16) unsigned char memory[];
  T* held = reinterpret_cast<T*>(memory);
  __shared__ Scratch scratch;
  __shared__ Partial own;
  constexpr int kStep = kThreads * N;
  const int rank = static_cast<int>(cluster.block_rank()), thread = threadIdx.x;
  const int64_t row = blockIdx.x / cluster.num_blocks();
  const int begin = rank * a.part;
  const int count = min(a.part, static_cast<int>(a.vocabulary) - begin);
  T* logits = static_cast<T*>(a.logits) + row * a.vocabulary;
  T* part = logits + begin;

  // A thread reads only what it copied itself: no barrier.
  for (int i = thread * N; i < count; i += kStep) {
    __pipeline_memcpy_async(held + i, part + i, 16);
  }
  __pipeline_commit();
  float labelled = 0;
  if (rank == 0 && thread == 0) labelled = label_logit(a, row, logits);
  __pipeline_wait_prior(0);
  Partial partial{kLowest, 0, 0};
#pragma unroll 4
  for (int i = thread * N; i < count; i += kStep) {
    float x[N];
    read(held + i, x);
#pragma unroll
    for (int n = 0; n < N; ++n) partial.maximum = fmaxf(partial.maximum, x[n]);
  }
  partial.maximum = block_maximum(partial.maximum, scratch) * kLog2e;
#pragma unroll 4
  for (int i = thread * N; i < count; i += kStep) {
    float x[N];
    read(held + i, x);
#pragma unroll
    for (int n = 0; n < N; ++n) partial.add(x[n] * kLog2e);
  }
  partial = block_total(partial, scratch);
  if (thread == 0) own = partial;
  cluster.sync();
  const int ranks = static_cast<int>(cluster.num_blocks());
  // Lane l joins the parts beginning with that of rank l mod ranks, a power of two.
  Partial whole = *cluster.map_shared_rank(&own, thread % ranks);
  for (int distance = ranks / 2; distance > 0; distance /= 2) {
    const Partial other{__shfl_xor_sync(0xffffffffu, whole.maximum, distance),
                        __shfl_xor_sync(0xffffffffu, whole.sum, distance),
                        __shfl_xor_sync(0xffffffffu, whole.depth, distance)};
    whole = join(whole, other);
  }
  // Nobody reads another's shared memory from here on, so that no CTA need wait at its end.
  cluster.barrier_arrive();
  const Row info = row_of(a, row, whole);
  if (rank == 0 && thread == 0) write_statistics(a, row, info, whole, labelled);
  if (a.rows.want_gradient) {
    const int label = static_cast<int>(info.label) - begin;
#pragma unroll 4
    for (int i = thread * N; i < count; i += kStep) {
      float x[N];
      read(held + i, x);
#pragma unroll
      for (int n = 0; n < N; ++n) x[n] = info.factor * info.probability(x[n]);
      if (label >= i && label < i + N) {
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] -= i + n == label ? info.factor : 0.f;
      }
      write(part + i, x);
    }
  }
  cluster.barrier_wait();
#endif
}

/// One row per CTA, read twice.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) streamed_kernel(const __grid_constant__ Arguments a) {
  __shared__ Scratch scratch;
  constexpr int64_t kStep = kThreads * N;
  const int64_t row = blockIdx.x;
  T* logits = static_cast<T*>(a.logits) + row * a.vocabulary;
  float labelled = 0;
  if (threadIdx.x == 0) labelled = label_logit(a, row, logits);
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
  const Row info = row_of(a, row, whole);
  if (threadIdx.x == 0) write_statistics(a, row, info, whole, labelled);
  if (!a.rows.want_gradient) return;
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
  int device = 0, major = 0, most_bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess ||
      major < 9) {
    return {};
  }
  // Three CTAs on a multiprocessor, if eight of them can hold the row then.
  constexpr int kPreferredBytes = 72 << 10, kReservedBytes = 1 << 10;
  const int64_t n = 16 / bytes_of(type);
  const auto part_of = [&](int ranks) { return (vocabulary / n + ranks - 1) / ranks * n; };
  int ranks = 1;
  while (ranks < kLargestCluster && part_of(ranks) * bytes_of(type) > kPreferredBytes) ranks *= 2;
  if (part_of(ranks) * bytes_of(type) > most_bytes - kReservedBytes) return {};
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
void launch_held(Arguments a, int64_t rows, const Split& split, cudaStream_t stream) {
  a.part = split.part;
  const int bytes = split.part * static_cast<int>(sizeof(T));
  cudaFuncSetAttribute(held_kernel<T, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows * split.ranks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(split.ranks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, held_kernel<T, N>, a);
}

}  // namespace

void softmax_gradient(const SoftmaxGradientShape& shape, void* logits,
                      const SoftmaxGradientRows& rows, cudaStream_t stream) {
  if (shape.rows == 0 || shape.vocabulary == 0) return;
  const Arguments a{shape.vocabulary, 0, logits, rows};
  const bool wide =
      aligned(InputRows{logits, shape.vocabulary, 0}, shape.type, shape.vocabulary, 16);
  const Split split = wide ? split_of(shape.vocabulary, shape.type) : Split{};
  dispatch_access(shape.type, wide, [&](auto access) {
    using T = typename decltype(access)::Type;
    constexpr int N = decltype(access)::kWidth;
    if constexpr (N > 1) {
      if (split.ranks > 0 && has_held_kernel<T, N>())
        return launch_held<T, N>(a, shape.rows, split, stream);
    }
    streamed_kernel<T, N><<<static_cast<unsigned>(shape.rows), kThreads, 0, stream>>>(a);
  });
  check_launch("softmax_gradient");
}

}  // namespace heddle::ops::cuda
