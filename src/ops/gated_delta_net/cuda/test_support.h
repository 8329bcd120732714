// Buffers and random inputs shared by the check and the benchmark of this folder.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "gated_delta_net.h"

namespace heddle::ops::cuda::gdn {

inline void cuda_check(cudaError_t e, const char* file, int line) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, cudaGetErrorString(e));
  std::exit(1);
}
#define GDN_CUDA(x) ::heddle::ops::cuda::gdn::cuda_check((x), __FILE__, __LINE__)

/// Device memory, filled with 0xff (NaN in every float format) so that an unwritten result shows.
template <class T>
struct Buffer {
  T* p = nullptr;
  size_t n = 0;
  explicit Buffer(size_t count = 0) : n(count) {
    GDN_CUDA(cudaMalloc(&p, bytes() ? bytes() : 16));
    poison();
  }
  explicit Buffer(const std::vector<T>& h) : Buffer(h.size()) {
    GDN_CUDA(cudaMemcpy(p, h.data(), bytes(), cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(p); }
  size_t bytes() const { return n * sizeof(T); }
  void poison(int byte = 0xff) { GDN_CUDA(cudaMemset(p, byte, bytes() ? bytes() : 16)); }
  std::vector<T> host() const {
    std::vector<T> h(n);
    GDN_CUDA(cudaMemcpy(h.data(), p, bytes(), cudaMemcpyDeviceToHost));
    return h;
  }
};

}  // namespace heddle::ops::cuda::gdn
