// A token drawn by the CTA of a row: from all of it, or from the tokens that its cuts keep
// (sampling.cu says how the launches go).
#pragma once

#include "ops/sampling/cuda/sampling_parts.cuh"

namespace heddle::ops::cuda::sampler {

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

}  // namespace heddle::ops::cuda::sampler
