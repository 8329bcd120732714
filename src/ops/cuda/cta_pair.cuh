// Clusters of two CTAs that send each other what both read (sm_90a).
#pragma once

#include <cuda_runtime_api.h>

#include "ops/cuda/ptx.cuh"

namespace heddle::ops::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ u32 rank_in_cluster() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
/// Waits for all CTAs of the cluster and orders no memory: before a CTA whose memory others have
/// read ends. The fence of cluster_sync() is one of the whole GPU and waits for what was written.
__device__ __forceinline__ void leave_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::
                   : "memory");
}
/// Makes initialised barriers visible to the other CTA; cluster_sync() follows.
__device__ __forceinline__ void fence_cluster_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Arrives at the barrier that lies at the same place in the shared memory of another CTA.
__device__ __forceinline__ void arrive_at(u32 bar, u32 rank) {
  asm volatile(
      "{.reg .b32 t; mapa.shared::cluster.u32 t, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [t];}" ::"r"(bar),
      "r"(rank)
      : "memory");
}
/// A box at the same place of both CTAs; each one's barrier counts its bytes.
__device__ __forceinline__ void load_to_both(u32 dst, const void* map, int column, int row,
                                             u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
      "l"(map), "r"(column), "r"(row), "r"(bar), "h"(static_cast<unsigned short>(3))
      : "memory");
}

#endif

/// Launches `pairs` clusters of two CTAs with dynamic shared memory of `bytes` each.
template <class Args>
void launch_pairs(void (*kernel)(Args), int pairs, int threads, u32 bytes, cudaStream_t stream,
                  const Args& args) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(bytes));
  cudaLaunchAttribute size{};
  size.id = cudaLaunchAttributeClusterDimension;
  size.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(2 * pairs));
  launch.blockDim = dim3(static_cast<unsigned>(threads));
  launch.dynamicSmemBytes = bytes;
  launch.stream = stream;
  launch.attrs = &size;
  launch.numAttrs = 1;
  cudaLaunchKernelEx(&launch, kernel, args);
}

}  // namespace heddle::ops::cuda
