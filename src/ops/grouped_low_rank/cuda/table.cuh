// Parts that the kernels of grouped products share: their tables of products.
#pragma once

#include <cstdint>

#include "ops/cuda/ptx.cuh"

namespace heddle::ops::cuda {

/// The last of `count` entries whose first tile is not beyond `tile`. Each lane looks at every
/// 32nd: searched one after another, places of the table that no cache holds yet would add up.
template <class Entry>
__device__ __forceinline__ int entry_of(const Entry* entries, int count, int tile) {
  int before = 0;
  for (int first = 0; first < count; first += 32) {
    const int i = first + static_cast<int>(threadIdx.x % 32);
    before += __popc(__ballot_sync(~0u, i < count && entries[i].first_tile <= tile));
  }
  return before - 1;
}

/// 8 elements to shared memory, those from `valid` on as zeros; one copy where they begin on 16
/// bytes.
__device__ __forceinline__ void copy8(u32 to, const bf16* from, int valid, bool is_aligned) {
  if (valid <= 0 || (is_aligned && valid >= 8)) {
    cp_async16(to, from, valid > 0);
    return;
  }
  u32 words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < valid) words[i / 2] |= static_cast<u32>(__bfloat16_as_ushort(from[i])) << (i % 2 * 16);
  }
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

inline bool begins_on_16_bytes(const void* matrix, int64_t stride) {
  return reinterpret_cast<uintptr_t>(matrix) % 16 == 0 && stride % 8 == 0;
}

}  // namespace heddle::ops::cuda
