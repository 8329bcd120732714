// Four launches. Three read the logits in chunks, with many CTAs a row: the largest logit and the
// sum of exponentials; then the chunks' masses (mass.h), which want the row's largest logit, or, of
// a row with cuts, counts and masses by the first digits of a logit's rank; then, of such a row,
// the few tokens that can be left: those whose digits are not below the ones at which the cut
// falls. In the last launch a CTA a row draws: without cuts from the chunks' masses and one chunk's
// logits, with cuts from the tokens that were collected, or, where they are too many, from passes
// over the whole row: a radix selection finds the least likely token that a cut keeps. Masses are
// whole numbers, so sums have one result whatever their order.
#include "ops/sampling/cuda/sampling.h"

#include <cmath>

#include "base/philox.h"
#include "ops/sampling/cuda/sampling_draw.cuh"

namespace heddle::ops::cuda {
namespace {

using namespace sampler;

template <class T>
__global__ void __launch_bounds__(kChunkThreads)
    statistics_kernel(const __grid_constant__ Arguments a) {
  const Row<T> logits = row_of<T>(a, blockIdx.y);
  const int first = blockIdx.x * kChunk, last = min(first + kChunk, a.in.vocabulary);
  if (blockIdx.x == 0 && has_cuts(a.in, blockIdx.y)) {
    for (int digit = threadIdx.x; digit < kDigits; digit += kChunkThreads) {
      a.digit_masses[static_cast<int64_t>(blockIdx.y) * kDigits + digit] = 0;
      a.digit_counts[static_cast<int64_t>(blockIdx.y) * kDigits + digit] = 0;
    }
  }
  float values[kChunk / kChunkThreads];
  float highest = -INFINITY;
  int id = first;
#pragma unroll
  for (int i = 0; i < kChunk / kChunkThreads; ++i) {
    const int at = first + i * kChunkThreads + threadIdx.x;
    values[i] = at < last ? logits[at] : -INFINITY;
    if (at < last && (values[i] > highest)) highest = values[i], id = at;
  }
  if (highest == -INFINITY) id = a.in.vocabulary;  // only if nothing else is higher
  most_likely(highest, id);
  double sum = 0;
  if (highest > -INFINITY) {
#pragma unroll
    for (int i = 0; i < kChunk / kChunkThreads; ++i)
      sum += static_cast<double>(__expf(values[i] - highest));
  }
  sum = cta_sum(sum);
  if (threadIdx.x == 0)
    a.found[static_cast<int64_t>(blockIdx.y) * a.chunks + blockIdx.x] = {
        sum, highest, id < a.in.vocabulary ? id : first};
}

/// The row's most likely token, in every thread.
__device__ __forceinline__ void row_highest(const Arguments& a, int row, float& highest, int& id) {
  highest = -INFINITY, id = 0;
  for (int c = threadIdx.x; c < a.chunks; c += blockDim.x) {
    const Chunk& chunk = a.found[static_cast<int64_t>(row) * a.chunks + c];
    if (c == static_cast<int>(threadIdx.x) || comes_first(chunk.highest, chunk.id, highest, id))
      highest = chunk.highest, id = chunk.id;
  }
  if (static_cast<int>(threadIdx.x) >= a.chunks) id = a.in.vocabulary;
  most_likely(highest, id);
}

__device__ __forceinline__ uint32_t digits_of(float logit) {
  return sampling::rank_of(__float_as_uint(logit)) >> (32 - kDigitBits);
}

/// Adds a chunk's counts and masses to those of the row.
template <class T>
__device__ __forceinline__ void count_digits(const Arguments& a, int row, const Row<T>& logits,
                                             int first, int last, float highest, float rate) {
  __shared__ unsigned counts[kDigits];
  __shared__ Mass masses[kDigits];
  for (int digit = threadIdx.x; digit < kDigits; digit += kChunkThreads)
    counts[digit] = 0, masses[digit] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kChunk / kChunkThreads; ++i) {
    const int at = first + i * kChunkThreads + threadIdx.x;
    if (at >= last) continue;
    const float logit = logits[at];
    const uint32_t digit = digits_of(logit);
    atomicAdd(&counts[digit], 1u);
    if (const Mass mass = sampling::mass_of(logit, highest, rate); mass > 0)
      atomicAdd(&masses[digit], mass);
  }
  __syncthreads();
  for (int digit = threadIdx.x; digit < kDigits; digit += kChunkThreads) {
    if (counts[digit] == 0) continue;
    atomicAdd(&a.digit_counts[static_cast<int64_t>(row) * kDigits + digit], counts[digit]);
    atomicAdd(&a.digit_masses[static_cast<int64_t>(row) * kDigits + digit], masses[digit]);
  }
}

template <class T>
__global__ void __launch_bounds__(kChunkThreads)
    masses_kernel(const __grid_constant__ Arguments a) {
  const int row = blockIdx.y;
  const float temperature = a.in.temperature[row];
  if (temperature <= 0) return;
  float highest;
  int id;
  row_highest(a, row, highest, id);
  const float rate = sampling::log2_rate(temperature);
  const Row<T> logits = row_of<T>(a, row);
  const int first = blockIdx.x * kChunk, last = min(first + kChunk, a.in.vocabulary);
  if (has_cuts(a.in, row)) {
    count_digits(a, row, logits, first, last, highest, rate);
    return;
  }
  Mass sum = 0;
#pragma unroll
  for (int i = 0; i < kChunk / kChunkThreads; ++i) {
    const int at = first + i * kChunkThreads + threadIdx.x;
    if (at < last) sum += sampling::mass_of(logits[at], highest, rate);
  }
  sum = cta_sum(sum);
  if (threadIdx.x == 0) a.masses[static_cast<int64_t>(row) * a.chunks + blockIdx.x] = sum;
}

/// The digits at which the row's cut falls: tokens of lower ones are not kept. 0 where no cut
/// bounds the tokens. A CTA of kChunkThreads.
__device__ __forceinline__ uint32_t digits_of_cut(const Arguments& a, int row) {
  constexpr int kOwn = kDigits / kChunkThreads;
  __shared__ Mass sums[kChunkThreads];
  __shared__ uint32_t cut;
  const int64_t base = static_cast<int64_t>(row) * kDigits;
  const int64_t top_k = a.in.top_k[row];
  const bool counts = top_k > 0 && top_k < a.in.vocabulary;
  if (!counts && !(a.in.top_p[row] < 1)) return 0;
  const auto weight = [&](int digit) -> Mass {
    return counts ? a.digit_counts[base + digit] : a.digit_masses[base + digit];
  };
  // A thread's digits, from the most likely ones on.
  const int highest = kDigits - 1 - static_cast<int>(threadIdx.x) * kOwn;
  Mass sum = 0;
  for (int i = 0; i < kOwn; ++i) sum += weight(highest - i);
  sums[threadIdx.x] = sum;
  const Mass total = cta_sum(sum);
  __syncthreads();
  if (threadIdx.x == 0) {
    Mass left = counts ? static_cast<Mass>(top_k) : sampling::part_of(total, a.in.top_p[row]);
    int thread = 0;
    while (thread < kChunkThreads - 1 && sums[thread] < left) left -= sums[thread++];
    int digit = kDigits - 1 - thread * kOwn;
    const int lowest = digit - kOwn + 1;
    while (digit > lowest && weight(digit) < left) left -= weight(digit--);
    cut = static_cast<uint32_t>(digit);
  }
  __syncthreads();
  return cut;
}

template <class T>
__global__ void __launch_bounds__(kChunkThreads)
    collect_kernel(const __grid_constant__ Arguments a) {
  __shared__ int warp_counts[kChunkThreads / 32];
  const int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (a.in.temperature[row] <= 0 || !has_cuts(a.in, row)) return;
  const uint32_t cut = digits_of_cut(a, row);
  const Row<T> logits = row_of<T>(a, row);
  const int first = blockIdx.x * kChunk, last = min(first + kChunk, a.in.vocabulary);
  const int64_t chunk = static_cast<int64_t>(row) * a.chunks + blockIdx.x;
  Candidate* const out = a.candidates + chunk * kChunkCandidates;
  int before = 0;
  for (int i = 0; i < kChunk / kChunkThreads; ++i) {
    const int at = first + i * kChunkThreads + threadIdx.x;
    const float logit = at < last ? logits[at] : 0.f;
    const bool is_left = at < last && digits_of(logit) >= cut;
    const unsigned left = __ballot_sync(0xffffffffu, is_left);
    if (lane == 0) warp_counts[warp] = __popc(left);
    __syncthreads();
    int place = before;
    for (int w = 0; w < kChunkThreads / 32; ++w) {
      if (w < warp) place += warp_counts[w];
      before += warp_counts[w];
    }
    place += __popc(left & ((1u << lane) - 1));
    if (is_left && place < kChunkCandidates) out[place] = {logit, at};
    __syncthreads();
  }
  if (threadIdx.x == 0) a.candidate_counts[chunk] = before;
}

/// One thread of the row, after all have read its position.
__device__ __forceinline__ void go_on(const SampleTokensArguments& in, int row, int id,
                                      double logprob, double sampled_logprob) {
  double* const told = in.told + ((in.positions[row] & 1) * in.batch + row) * 3;
  told[0] = id, told[1] = logprob, told[2] = sampled_logprob;
  const int64_t is_real = in.is_real[row];
  in.next_tokens[row] = is_real ? id : 0;
  for (int i = 0; i < in.counted; ++i)
    in.counts[static_cast<int64_t>(i) * in.batch + row] += is_real;
}

template <class T>
__global__ void __launch_bounds__(kDrawThreads) draw_kernel(const __grid_constant__ Arguments a) {
  const int row = blockIdx.x;
  float highest;
  int best;
  row_highest(a, row, highest, best);
  int id = best;
  Mass total = 0;
  const float temperature = a.in.temperature[row];
  const bool cuts = has_cuts(a.in, row);
  if (temperature > 0) {
    const double uniform = philox::uniform(philox::words(static_cast<uint64_t>(a.in.seeds[row]),
                                                         static_cast<uint64_t>(a.in.positions[row]),
                                                         a.in.stream_name));
    id = cuts ? draw_cut<T>(a, row, highest, best, uniform, total)
              : draw_of_all<T>(a, row, highest, best, uniform, total);
  } else if (a.in.support > 0 && threadIdx.x == 0) {
    a.in.supports[static_cast<int64_t>(row) * a.in.support] = best;
  }
  double sum = 0;
  for (int c = threadIdx.x; c < a.chunks; c += kDrawThreads) {
    const Chunk& chunk = a.found[static_cast<int64_t>(row) * a.chunks + c];
    sum += chunk.sum * exp(static_cast<double>(chunk.highest - highest));
  }
  sum = cta_sum(sum);
  if (threadIdx.x == 0) {
    const float logit = row_of<T>(a, row)[id];
    const double logprob = static_cast<double>(logit - highest) - log(sum);
    a.in.ids[row] = id;
    a.in.logprobs[row] = logprob;
    double sampled = 0;
    if (temperature == 1.f && !cuts) {
      sampled = logprob;
    } else if (total > 0) {
      const Mass mass = sampling::mass_of(logit, highest, sampling::log2_rate(temperature));
      sampled = log(static_cast<double>(mass) / static_cast<double>(total));
    }
    a.in.sampled_logprobs[row] = sampled;
    if (a.in.next_tokens != nullptr) go_on(a.in, row, id, logprob, sampled);
  }
}

int64_t chunks_of(int64_t vocabulary) { return (vocabulary + kChunk - 1) / kChunk; }

}  // namespace

int64_t sample_tokens_workspace(int64_t batch, int64_t vocabulary) {
  const int64_t chunk = sizeof(Chunk) + sizeof(Mass) + kChunkCandidates * sizeof(Candidate) +
                        sizeof(int),
                digits = kDigits * (sizeof(Mass) + sizeof(unsigned));
  return batch * (chunks_of(vocabulary) * chunk + digits);
}

void sample_tokens(const SampleTokensArguments& arguments, cudaStream_t stream) {
  if (arguments.batch == 0) return;
  Arguments a{};
  a.in = arguments;
  a.chunks = static_cast<int>(chunks_of(arguments.vocabulary));
  a.found = static_cast<Chunk*>(arguments.workspace);
  // The widest first: each begins at a multiple of its own elements.
  const int64_t chunks = static_cast<int64_t>(a.in.batch) * a.chunks,
                digits = static_cast<int64_t>(a.in.batch) * kDigits;
  a.masses = reinterpret_cast<Mass*>(a.found + chunks);
  a.digit_masses = a.masses + chunks;
  a.candidates = reinterpret_cast<Candidate*>(a.digit_masses + digits);
  a.digit_counts = reinterpret_cast<unsigned*>(a.candidates + chunks * kChunkCandidates);
  a.candidate_counts = reinterpret_cast<int*>(a.digit_counts + digits);
  const dim3 grid(static_cast<unsigned>(a.chunks), static_cast<unsigned>(a.in.batch));
  dispatch_access(arguments.type, false, [&](auto access) {
    using T = typename decltype(access)::Type;
    statistics_kernel<T><<<grid, kChunkThreads, 0, stream>>>(a);
    masses_kernel<T><<<grid, kChunkThreads, 0, stream>>>(a);
    collect_kernel<T><<<grid, kChunkThreads, 0, stream>>>(a);
    constexpr int kBytes = kBinBytes + kCandidates * static_cast<int>(sizeof(Candidate));
    cudaFuncSetAttribute(draw_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    draw_kernel<T><<<a.in.batch, kDrawThreads, kBytes, stream>>>(a);
  });
  check_launch("sample_tokens");
}

}  // namespace heddle::ops::cuda
