// Parts of the products of a few rows with large matrices (few_rows.cu says how they go):
// mma.m16n8k16 with the columns of b as its 16 and the rows of a as its 8.
#pragma once

#include "ops/cuda/mma.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/linear/cuda/few_rows.h"

namespace heddle::ops::cuda {

using FewRowVector = Packed<bf16, 8>;

/// Columns of a CTA, and the depth of a block of products.
constexpr int kFewRowColumns = 16, kFewRowDepth = 32;

/// Adds the products of a block of the depth: 8 columns each of low and high, 8 rows a tile.
template <int kTiles>
__device__ __forceinline__ void multiply(float (&total)[kTiles][4], const FewRowVector& low,
                                         const FewRowVector& high,
                                         const FewRowVector (&a)[kTiles]) {
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
      const u32 columns[4] = {low.words[half], high.words[half], low.words[half + 1],
                              high.words[half + 1]};
      mma_bf16(total[r], columns, a[r].words[half], a[r].words[half + 1]);
    }
  }
}

/// Sums of a warp, by row and column.
template <int kTiles>
__device__ __forceinline__ void put(float (&to)[kTiles][8][kFewRowColumns],
                                    const float (&total)[kTiles][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[r][lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = total[r][i];
  }
}

/// Multiplies 8 elements of each row by the norm's scale, and adds their squares.
template <int kTiles>
__device__ __forceinline__ void apply_norm(const FewRowNorm& norm, int column,
                                           FewRowVector (&a)[kTiles], float (&squares)[kTiles]) {
  float weight[8];
  read_weight(norm.weight, norm.weight_type, column, weight);
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    float x[8];
    unpack(a[r], x);
#pragma unroll
    for (int i = 0; i < 8; ++i) squares[r] += x[i] * x[i], x[i] *= norm.offset + weight[i];
    a[r] = pack<bf16>(x);
  }
}

__device__ __forceinline__ float read_one(const void* weight, Element type, int column) {
  return type == Element::kBFloat16 ? __bfloat162float(static_cast<const bf16*>(weight)[column])
                                    : static_cast<const float*>(weight)[column];
}

/// Rows may have been written since the CTA's launch: not by way of the first level of cache.
__device__ __forceinline__ FewRowVector load_row(const void* row, int64_t at) {
  const uint4 v = __ldcg(reinterpret_cast<const uint4*>(static_cast<const bf16*>(row) + at));
  return {{v.x, v.y, v.z, v.w}};
}

__device__ __forceinline__ float load_value(const void* row, int64_t at) {
  return __uint_as_float(static_cast<u32>(__ldcg(static_cast<const unsigned short*>(row) + at))
                         << 16);
}

/// Asks for memory to be near the multiprocessors soon; begins on 16 bytes and is a multiple of
/// them.
__device__ __forceinline__ void bring_near(const void* address, u32 bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (bytes > 0)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes)
                 : "memory");
#endif
}

/// A part of a table of slots, which stays near while weights stream by: each launch waits for it
/// before it knows what to read.
__device__ __forceinline__ u64 load_kept(const u64* address) {
  u64 v, policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.L2::cache_hint.u64 %0, [%1], %2;"
               : "=l"(v)
               : "l"(address), "l"(policy)
               : "memory");
  return v;
}

__device__ __forceinline__ SlotRun load_run(const SlotRun* runs, int place) {
  const u64* const words = reinterpret_cast<const u64*>(runs + place);
  const u64 first = load_kept(words), second = load_kept(words + 1);
  return {static_cast<int32_t>(first), static_cast<int32_t>(first >> 32),
          static_cast<int32_t>(second), 0};
}

__device__ __forceinline__ SlotFactors load_factors(const SlotFactors* slots, int slot) {
  const u64* const words = reinterpret_cast<const u64*>(slots + slot);
  const u64 a = load_kept(words), b = load_kept(words + 1), rest = load_kept(words + 2);
  return {reinterpret_cast<const void*>(a), reinterpret_cast<const void*>(b),
          static_cast<int32_t>(rest), __uint_as_float(static_cast<u32>(rest >> 32))};
}

/// 4 elements of a row of `rank` from `at` on, those beyond it as zeros.
__device__ __forceinline__ uint2 load_factor4(const bf16* row, int at, int rank, bool is_valid) {
  uint2 v = make_uint2(0, 0);
  if (!is_valid) return v;
  if (rank % 4 == 0) {
    if (at < rank) v = *reinterpret_cast<const uint2*>(row + at);
    return v;
  }
  const auto element = [&](int i) {
    return i < rank ? static_cast<u32>(__bfloat16_as_ushort(row[i])) : 0u;
  };
  return make_uint2(element(at) | element(at + 1) << 16, element(at + 2) | element(at + 3) << 16);
}

}  // namespace heddle::ops::cuda
