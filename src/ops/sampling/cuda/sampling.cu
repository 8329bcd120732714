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
#include "ops/cuda/vector.cuh"
#include "ops/sampling/mass.h"

namespace heddle::ops::cuda {
namespace {

constexpr int kChunk = 4096, kChunkThreads = 256, kDrawThreads = 1024, kEach = 8;
constexpr int kMostChunks = (1 << 19) / kChunk;
constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;  // sign, exponent, 2 bits of the rest
/// Tokens collected of a chunk and of a row, at most; with more the whole row is read.
constexpr int kChunkCandidates = 256, kCandidates = 4096;
using Mass = unsigned long long;

struct Chunk {
  double sum;  // of exp(logit - highest)
  float highest;
  int id;  // the lowest with that logit
};

struct Candidate {
  float logit;
  int id;
};

struct Arguments {
  SampleTokensArguments in;
  int chunks;
  Chunk* found;            // [batch,chunks]
  Mass* masses;            // [batch,chunks]
  Mass* digit_masses;      // [batch,kDigits], of rows with cuts, as what follows
  Candidate* candidates;   // [batch,chunks,kChunkCandidates], in the order of ids
  unsigned* digit_counts;  // [batch,kDigits]
  int* candidate_counts;   // [batch,chunks], what there would be
};

template <class T>
struct Row {
  const T* logits;

  __device__ __forceinline__ float operator[](int id) const {
    float value[1];
    read(logits + id, value);
    return value[0];
  }
};

template <class T>
__device__ __forceinline__ Row<T> row_of(const Arguments& a, int row) {
  return {static_cast<const T*>(a.in.logits.data) + row * a.in.logits.outer_stride};
}

__device__ __forceinline__ bool comes_first(float x, int id, float other, int other_id) {
  return x > other || (x == other && id < other_id);
}

/// The most likely token of the CTA's threads, in every thread.
__device__ __forceinline__ void most_likely(float& highest, int& id) {
  __shared__ float values[32];
  __shared__ int ids[32];
  const auto over_warp = [&] {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const float x = __shfl_xor_sync(0xffffffffu, highest, distance);
      const int other = __shfl_xor_sync(0xffffffffu, id, distance);
      if (comes_first(x, other, highest, id)) highest = x, id = other;
    }
  };
  over_warp();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) values[warp] = highest, ids[warp] = id;
  __syncthreads();
  const int warps = blockDim.x / 32;
  highest = values[lane % warps], id = ids[lane % warps];
  over_warp();
}

template <class N>
__device__ __forceinline__ N warp_sum(N value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

/// The sum over the CTA, in every thread, in a fixed order.
template <class N>
__device__ __forceinline__ N cta_sum(N value) {
  __shared__ N sums[32];
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
  return warp_sum(lane < blockDim.x / 32 ? sums[lane] : N{0});
}

__device__ __forceinline__ bool has_cuts(const SampleTokensArguments& in, int row) {
  return in.top_p[row] < 1 || in.min_p[row] > 0 || in.top_k[row] > 0;
}

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

/// The first of the ids [first, last) at which the running sum of `weight` passes `place`, in every
/// thread; `last` if it never does. A CTA of kDrawThreads.
template <class Weight>
__device__ __forceinline__ int find(int first, int last, Mass place, const Weight& weight) {
  __shared__ Mass sums[kDrawThreads / 32];
  __shared__ int found;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();
  if (threadIdx.x == 0) found = last;
  Mass before = 0;
  for (int base = first; base < last; base += kDrawThreads * kEach) {
    const int own = base + threadIdx.x * kEach;
    Mass weights[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      weights[i] = own + i < last ? weight(own + i) : 0;
      sum += weights[i];
    }
    Mass upto = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const Mass other = __shfl_up_sync(0xffffffffu, upto, distance);
      if (lane >= distance) upto += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    const Mass of_warp = sums[lane];
    Mass warps_before = warp_sum(lane < warp ? of_warp : Mass{0});
    const Mass total = warp_sum(of_warp);
    Mass running = before + warps_before + upto - sum;
    if (running <= place && place < running + sum) {
      for (int i = 0; i < kEach; ++i) {
        running += weights[i];
        if (place < running) {
          found = own + i;
          break;
        }
      }
    }
    before += total;
    if (place < before) break;
  }
  __syncthreads();
  return found;
}

/// Tokens that rank above `rank`, those of this rank up to the id `last`, and of these those of at
/// least `least` mass.
struct Kept {
  uint32_t rank;
  int last;
  Mass least;

  __device__ __forceinline__ bool holds(uint32_t other, int id) const {
    return other > rank || (other == rank && id <= last);
  }
};

/// Tokens in the order of their ids: all of a row.
template <class T>
struct WholeRow {
  Row<T> logits;
  int count;

  __device__ __forceinline__ float logit(int i) const { return logits[i]; }
  __device__ __forceinline__ int id(int i) const { return i; }
};

/// Tokens that were collected, in shared memory.
struct Collected {
  const Candidate* tokens;
  int count;

  __device__ __forceinline__ float logit(int i) const { return tokens[i].logit; }
  __device__ __forceinline__ int id(int i) const { return tokens[i].id; }
};

/// Calls f(i, logit) for every token, from a CTA of kDrawThreads whose warps stay together: beyond
/// the last with -1. Several loads are under way.
template <class Tokens, class F>
__device__ __forceinline__ void for_each(const Tokens& tokens, const F& f) {
  for (int base = threadIdx.x; base - static_cast<int>(threadIdx.x) < tokens.count;
       base += kDrawThreads * kEach) {
    float values[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = base + i * kDrawThreads;
      values[i] = at < tokens.count ? tokens.logit(at) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = base + i * kDrawThreads;
      f(at < tokens.count ? at : -1, values[i]);
    }
  }
}

constexpr int kBins = 256, kBinBytes = kDrawThreads / 32 * kBins * static_cast<int>(sizeof(Mass));

/// The rank at which the sum of `weight(id, logit)` over the tokens from the most likely one on
/// reaches `wanted`; what is wanted of that rank's tokens remains. A CTA of kDrawThreads. Each warp
/// has its own bins, into which it adds the sum of the lanes that fall into one: most logits share
/// their first digits.
template <class Tokens, class Weight>
__device__ __forceinline__ uint32_t select_rank(const Tokens& tokens, Mass& wanted,
                                                const Weight& weight) {
  extern __shared__ Mass bins[];  // [warps][kBins]
  __shared__ Mass remaining;
  __shared__ uint32_t chosen;
  Mass* const own = bins + threadIdx.x / 32 * kBins;
  uint32_t prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    for (int bin = threadIdx.x % 32; bin < kBins; bin += 32) own[bin] = 0;
    __syncwarp();
    for_each(tokens, [&](int id, float logit) {
      const uint32_t rank = sampling::rank_of(__float_as_uint(logit));
      const Mass w = id >= 0 && (rank & mask) == prefix ? weight(id, logit) : 0;
      const unsigned adding = __ballot_sync(0xffffffffu, w > 0);
      if (w > 0) {
        const uint32_t bin = rank >> shift & 255u;
        const unsigned peers = __match_any_sync(adding, bin);
        // A mass has 44 bits: two halves whose sums over a warp fit 32 bits.
        const Mass low = __reduce_add_sync(peers, static_cast<unsigned>(w & 0x3fffffu)),
                   high = __reduce_add_sync(peers, static_cast<unsigned>(w >> 22));
        if (static_cast<int>(threadIdx.x % 32) == __ffs(peers) - 1) own[bin] += low + (high << 22);
      }
      __syncwarp();
    });
    __syncthreads();
    if (threadIdx.x < kBins) {
      Mass sum = 0;
      for (int w = 0; w < kDrawThreads / 32; ++w) sum += bins[w * kBins + threadIdx.x];
      bins[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      Mass left = wanted;
      int bin = kBins - 1;
      while (bin > 0 && bins[bin] < left) left -= bins[bin--];
      remaining = left, chosen = static_cast<uint32_t>(bin);
    }
    __syncthreads();
    wanted = remaining;
    prefix |= chosen << shift, mask |= 255u << shift;
  }
  return prefix;
}

/// The place of the drawn token; -1 if no token has a mass. `whole` is the mass of the row, of
/// which the tokens may be a part; `total` becomes that of all tokens that it draws from.
template <class Tokens>
__device__ __forceinline__ int draw_with_cuts(const Arguments& a, int row, const Tokens& tokens,
                                              float highest, double uniform, Mass whole,
                                              Mass& total) {
  const float rate = sampling::log2_rate(a.in.temperature[row]);
  const auto rank_of = [](float logit) { return sampling::rank_of(__float_as_uint(logit)); };
  Kept kept{0, tokens.count, 0};
  const auto weight = [&](int i, float logit) -> Mass {
    if (!kept.holds(rank_of(logit), i)) return 0;
    const Mass mass = sampling::mass_of(logit, highest, rate);
    return mass >= kept.least ? mass : 0;
  };
  const auto total_weight = [&] {
    Mass sum = 0;
    for_each(tokens, [&](int i, float logit) { sum += i >= 0 ? weight(i, logit) : 0; });
    return cta_sum(sum);
  };
  // The lowest ids of equal logits stay.
  const auto keep_from = [&](uint32_t rank, Mass count) {
    kept.last = find(0, tokens.count, count - 1, [&](int i) -> Mass {
      const uint32_t other = rank_of(tokens.logit(i));
      return other == rank && kept.holds(other, i) ? 1 : 0;
    });
    kept.rank = rank;
  };
  const int64_t top_k = a.in.top_k[row];
  const bool counts = top_k > 0 && top_k < a.in.vocabulary;
  if (counts) {
    Mass wanted = static_cast<Mass>(top_k);
    const uint32_t rank = select_rank(tokens, wanted, [](int, float) -> Mass { return 1; });
    keep_from(rank, wanted);
  }
  if (const double top_p = a.in.top_p[row]; top_p < 1) {
    total = counts ? total_weight() : whole;
    if (total == 0) return -1;
    Mass wanted = sampling::part_of(total, top_p);
    const uint32_t rank = select_rank(tokens, wanted, weight);
    // Tokens of one rank have one mass.
    const Mass each = sampling::mass_of(
        __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank), highest, rate);
    keep_from(rank, (wanted + each - 1) / each);
  }
  if (const double min_p = a.in.min_p[row]; min_p > 0)
    kept.least = sampling::part_of(Mass{1} << sampling::kMassBits, min_p);
  total = total_weight();
  if (total == 0) return -1;
  if (a.in.support > 0) {
    __shared__ int told;
    if (threadIdx.x == 0) told = 0;
    __syncthreads();
    for_each(tokens, [&](int i, float logit) {
      if (i < 0 || weight(i, logit) == 0) return;
      const int place = atomicAdd(&told, 1);
      if (place < a.in.support)
        a.in.supports[static_cast<int64_t>(row) * a.in.support + place] = tokens.id(i);
    });
  }
  return find(0, tokens.count, sampling::place_of(total, uniform),
              [&](int i) { return weight(i, tokens.logit(i)); });
}

/// Brings the collected tokens of a row into shared memory; how many, or -1: they do not fit.
__device__ __forceinline__ int gather(const Arguments& a, int row, Candidate* tokens) {
  __shared__ int firsts[kMostChunks + 1];
  const int64_t base = static_cast<int64_t>(row) * a.chunks;
  __syncthreads();
  if (threadIdx.x == 0) {
    firsts[0] = 0;
    bool fits = true;
    for (int c = 0; c < a.chunks; ++c) {
      const int count = a.candidate_counts[base + c];
      fits = fits && count <= kChunkCandidates;
      firsts[c + 1] = firsts[c] + count;
    }
    if (!fits || firsts[a.chunks] > kCandidates) firsts[0] = -1;
  }
  __syncthreads();
  if (firsts[0] < 0) return -1;
  for (int c = threadIdx.x / 32; c < a.chunks; c += kDrawThreads / 32) {
    const Candidate* const from = a.candidates + (base + c) * kChunkCandidates;
    for (int i = threadIdx.x % 32; i < firsts[c + 1] - firsts[c]; i += 32)
      tokens[firsts[c] + i] = from[i];
  }
  __syncthreads();
  return firsts[a.chunks];
}

/// `best` where no token has a mass.
template <class T>
__device__ __forceinline__ int draw_cut(const Arguments& a, int row, float highest, int best,
                                        double uniform, Mass& total) {
  extern __shared__ Mass bins[];  // of select_rank; then the collected tokens
  Candidate* const collected = reinterpret_cast<Candidate*>(bins + kBinBytes / sizeof(Mass));
  Mass whole = 0;
  for (int digit = threadIdx.x; digit < kDigits; digit += kDrawThreads)
    whole += a.digit_masses[static_cast<int64_t>(row) * kDigits + digit];
  whole = cta_sum(whole);
  if (const int count = gather(a, row, collected); count >= 0) {
    const Collected tokens{collected, count};
    const int at = draw_with_cuts(a, row, tokens, highest, uniform, whole, total);
    return at < 0 || at >= count ? best : tokens.id(at);
  }
  const WholeRow<T> tokens{row_of<T>(a, row), a.in.vocabulary};
  const int at = draw_with_cuts(a, row, tokens, highest, uniform, whole, total);
  return at < 0 ? best : at;
}

template <class T>
__device__ __forceinline__ int draw_of_all(const Arguments& a, int row, float highest, int best,
                                           double uniform, Mass& total) {
  const Mass* const masses = a.masses + static_cast<int64_t>(row) * a.chunks;
  for (int c = threadIdx.x; c < a.chunks; c += kDrawThreads) total += masses[c];
  total = cta_sum(total);
  if (total == 0) return best;
  const Mass place = sampling::place_of(total, uniform);
  const int chunk = find(0, a.chunks, place, [&](int c) { return masses[c]; });
  Mass before = 0;
  for (int c = threadIdx.x; c < chunk; c += kDrawThreads) before += masses[c];
  before = cta_sum(before);
  const Row<T> logits = row_of<T>(a, row);
  const float rate = sampling::log2_rate(a.in.temperature[row]);
  return find(chunk * kChunk, min((chunk + 1) * kChunk, a.in.vocabulary), place - before,
              [&](int id) -> Mass { return sampling::mass_of(logits[id], highest, rate); });
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
