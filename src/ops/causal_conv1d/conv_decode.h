#pragma once

#include "ops/cache_rows.h"
#include "ops/causal_conv1d/causal_conv1d.h"
#include "ops/registry.h"

namespace heddle::ops {

struct ConvDecode {
  static constexpr const char* kName = "conv_decode";
  using Dims = CausalConv1d::Dims;
  struct Functions {
    at::Tensor (*forward)(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& states,
                          const CacheRows&);
  };
};

/// causal_conv1d of one new token in each of B sequences: x [B,C], weight [C,W] with 2 <= W <= 8;
/// states [slots,C,W-1] contiguous, in the dtype of x, hold the last inputs, oldest first, and are
/// shifted in place. Returns y [B,C]. Not differentiable. TORCH_CHECKs that every slot exists; no
/// two sequences may share one.
at::Tensor conv_decode(const KernelTable& kernels, const at::Tensor& x, const at::Tensor& weight,
                       const at::Tensor& states, const CacheRows& rows);

}  // namespace heddle::ops
