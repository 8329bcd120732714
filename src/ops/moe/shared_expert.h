#pragma once

#include <utility>

#include "ops/registry.h"

namespace heddle::ops {

struct SharedExpertSum {
  static constexpr const char* kName = "shared_expert_sum";
  struct Dims {
    std::int64_t hidden_size = 0;
  };
  struct Functions {
    /// `residual` may be undefined: zero.
    at::Tensor (*forward)(const at::Tensor& routed, const at::Tensor& shared,
                          const at::Tensor& gate, const at::Tensor& residual);
    /// Gradients of shared and gate; those of routed and residual are grad_y.
    std::pair<at::Tensor, at::Tensor> (*backward)(const at::Tensor& shared, const at::Tensor& gate,
                                                  const at::Tensor& grad_y);
  };
};

/// y = residual + (routed + sigmoid(gate) * shared): what a layer's experts add up to, and the
/// residual if it is defined. routed, shared, residual, y [T,H], gate [T,1]. Differentiable in all.
/// Source: transformers' mixture blocks that have a shared expert.
at::Tensor shared_expert_sum(const KernelTable& kernels, const at::Tensor& routed,
                             const at::Tensor& shared, const at::Tensor& gate,
                             const at::Tensor& residual = {});

}  // namespace heddle::ops
