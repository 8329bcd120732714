// A kernel that begins while the one before it in the stream ends ("programmatic dependent launch",
// sm_90 and newer): a step of one token is hundreds of short kernels, and a start costs as much as
// the work of many of them.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

namespace heddle::ops::cuda {

/// Waits until the kernels before this one have ended and what they wrote can be read. Before it a
/// kernel reads nothing but weights, which no kernel of a recording writes, and writes nothing.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// The next kernel may begin as soon as all CTAs of this one have come here; it waits for the end
/// of this one where it says so.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Launches a kernel that calls wait_for_previous(). Only while the stream is recorded does it
/// begin early: elsewhere the weights that it reads first may just have been written.
template <class... Parameters, class... Arguments>
void launch_dependent(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                      cudaStream_t stream, Arguments&&... arguments) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = status == cudaStreamCaptureStatusActive ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace heddle::ops::cuda
