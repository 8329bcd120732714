#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::ops {

/// The boundaries of the sequences packed along a token axis of length T. Host and device copies:
/// kernels of some devices want host lengths, and a synchronisation to get them would come too
/// late.
struct Sequences {
  at::Tensor cu_seqlens;  ///< [S+1] int32 on the device of the activations; first 0, last T,
                          ///< non-decreasing.
  std::vector<std::int32_t> cu_seqlens_host;  ///< Host copies of the numbers.
  std::int64_t max_seqlen = 0;

  std::int64_t count() const { return static_cast<std::int64_t>(cu_seqlens_host.size()) - 1; }
  std::int64_t total() const { return cu_seqlens_host.back(); }

  /// From host boundaries. TORCH_CHECKs that they begin with 0 and do not decrease.
  static Sequences from_host(std::vector<std::int32_t> cu_seqlens, c10::Device device);
};

}  // namespace heddle::ops
