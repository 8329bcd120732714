// Reads a bucket once, 16 bytes a load; a thread adds in a register, a CTA in shared memory, and
// one atomic addition for each CTA ends it: sums modulo 2^64 do not depend on the order. The three
// products of 64 bits a word stay below the time of its load.
#include "base/splitmix.h"
#include "ops/cuda/element.h"
#include "sync/cuda/checksum_kernel.h"

namespace heddle::sync::cuda {
namespace {

constexpr int kThreads = 256, kMostCtas = 1056;  // 8 for each of 132 multiprocessors
using Word = unsigned long long;

__device__ __forceinline__ Word mixed_word(Word word, std::int64_t place) {
  return splitmix::mixed(word + static_cast<Word>(place + 1) * splitmix::kStride);
}

__global__ void __launch_bounds__(kThreads)
    checksum_kernel(const Word* __restrict__ words, std::int64_t count, Word* __restrict__ sum) {
  __shared__ Word sums[kThreads / 32];
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x,
                     threads = static_cast<std::int64_t>(gridDim.x) * kThreads, pairs = count / 2;
  const auto* const pair = reinterpret_cast<const ulonglong2*>(words);
  Word own = 0;
#pragma unroll 4
  for (std::int64_t i = thread; i < pairs; i += threads) {
    const ulonglong2 two = pair[i];
    own += mixed_word(two.x, 2 * i) + mixed_word(two.y, 2 * i + 1);
  }
  if (thread == 0 && count % 2 == 1) own += mixed_word(words[count - 1], count - 1);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    own += __shfl_xor_sync(0xffffffffu, own, distance);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Word all = 0;
  for (const Word warp : sums) all += warp;
  atomicAdd(sum, all);
}

}  // namespace

void add_checksum(const std::uint64_t* words, std::int64_t count, std::uint64_t* sum,
                  cudaStream_t stream) {
  if (count == 0) return;
  const std::int64_t wanted = (count / 2 + kThreads) / kThreads;
  const auto ctas = static_cast<unsigned>(wanted < kMostCtas ? wanted : kMostCtas);
  checksum_kernel<<<ctas, kThreads, 0, stream>>>(reinterpret_cast<const Word*>(words), count,
                                                 reinterpret_cast<Word*>(sum));
  ops::cuda::check_launch("checksum");
}

}  // namespace heddle::sync::cuda
