// A warp has a segment of assignments. It counts their experts; one CTA adds the segments up,
// expert by expert; then each warp walks over its segment again, 32 at a time, and gives each
// assignment the next place of its expert. Lanes with the same expert find each other by match_any
// and keep their order.
#include <stdexcept>
#include <string>

#include "ops/moe/cuda/expert_order.h"

namespace heddle::ops::cuda {
namespace {

constexpr int kWarps = 4, kScanThreads = 1024;

/// `next`: the counters of this warp's segment, in shared memory.
template <bool kPlaces>
__device__ __forceinline__ void walk(int64_t count, int64_t segment, const int64_t* experts,
                                     int* next, int64_t* source, int64_t* place) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t begin = segment * kOrderSegment;
  for (int64_t first = begin; first < begin + kOrderSegment && first < count; first += 32) {
    const int64_t i = first + lane;
    const bool is_there = i < count;
    const int expert = is_there ? static_cast<int>(experts[i]) : -1;
    const unsigned same = __match_any_sync(0xffffffffu, expert);
    const int before = __popc(same & ((1u << lane) - 1));
    if (is_there && kPlaces) {
      const int64_t p = next[expert] + before;
      source[p] = i;
      place[i] = p;
    }
    __syncwarp();
    if (is_there && before == 0) next[expert] += __popc(same);
    __syncwarp();
  }
}

template <bool kPlaces>
__global__ void __launch_bounds__(kWarps * 32)
    walk_kernel(int64_t count, int keys, int64_t segments, const int64_t* experts, int32_t* counts,
                int64_t* source, int64_t* place) {
  extern __shared__ int shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t segment = int64_t{blockIdx.x} * kWarps + warp;
  if (segment >= segments) return;
  int* const next = shared + warp * keys;
  int32_t* const own = counts + segment * keys;
  for (int e = lane; e < keys; e += 32) next[e] = kPlaces ? own[e] : 0;
  __syncwarp();
  walk<kPlaces>(count, segment, experts, next, source, place);
  if constexpr (!kPlaces) {
    for (int e = lane; e < keys; e += 32) own[e] = next[e];
  }
}

/// counts [segments, keys] become first places; one CTA.
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(int keys, int64_t segments, int32_t* counts, int32_t* ends) {
  __shared__ int warp_sums[kScanThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32;
  int before_all = 0;
  for (int first = 0; first < keys; first += kScanThreads) {
    const int e = first + static_cast<int>(threadIdx.x);
    int total = 0;
    if (e < keys) {
#pragma unroll 8
      for (int64_t s = 0; s < segments; ++s) total += counts[s * keys + e];
    }
    int sum = total;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int before = before_all, all = before_all;
    for (int w = 0; w < kScanThreads / 32; ++w) {
      if (w < warp) before += warp_sums[w];
      all += warp_sums[w];
    }
    __syncthreads();
    before_all = all;
    if (e >= keys) continue;
    before += sum - total;
    if (e + 1 < keys) ends[e] = before + total;
#pragma unroll 8
    for (int64_t s = 0; s < segments; ++s) {
      const int n = counts[s * keys + e];
      counts[s * keys + e] = before;
      before += n;
    }
  }
}

}  // namespace

void expert_order(int64_t count, int64_t expert_count, const int64_t* experts, int64_t* source,
                  int64_t* place, int32_t* ends, int32_t* counts, cudaStream_t stream) {
  if (expert_count > kMostOrderedExperts || count >= int64_t{1} << 31) {
    throw std::invalid_argument("expert_order (cuda): " + std::to_string(count) +
                                " assignments to " + std::to_string(expert_count) +
                                " experts; it takes 1024 experts and 2^31 - 1 assignments");
  }
  const int keys = static_cast<int>(expert_count) + 1;
  const int64_t segments = order_segments(count);
  const auto blocks = static_cast<unsigned>((segments + kWarps - 1) / kWarps);
  const std::size_t shared = sizeof(int) * kWarps * static_cast<std::size_t>(keys);
  if (blocks > 0) {
    walk_kernel<false><<<blocks, kWarps * 32, shared, stream>>>(count, keys, segments, experts,
                                                                counts, nullptr, nullptr);
  }
  scan_kernel<<<1, kScanThreads, 0, stream>>>(keys, segments, counts, ends);
  if (blocks > 0) {
    walk_kernel<true><<<blocks, kWarps * 32, shared, stream>>>(count, keys, segments, experts,
                                                               counts, source, place);
  }
  check_launch("expert_order");
}

}  // namespace heddle::ops::cuda
