#pragma once

#include <tuple>
#include <utility>

#include "ops/output_again.h"
#include "ops/registry.h"

namespace heddle::ops {

struct Swiglu {
  static constexpr const char* kName = "swiglu";
  struct Dims {
    std::int64_t dim = 0;  ///< Elements of a row on this rank.
  };
  struct Functions {
    at::Tensor (*forward)(const at::Tensor& gate, const at::Tensor& up);
    /// Gradients of gate and up. Recomputes the activation from its inputs.
    std::pair<at::Tensor, at::Tensor> (*backward)(const at::Tensor& gate, const at::Tensor& up,
                                                  const at::Tensor& grad_y);
    /// Gradients and y again, in one pass; null: in two.
    std::tuple<at::Tensor, at::Tensor, at::Tensor> (*backward_again)(
        const at::Tensor& gate, const at::Tensor& up, const at::Tensor& grad_y) = nullptr;
  };
};

/// y = silu(gate) * up. gate, up [T,F] with unit stride over F; y [T,F] contiguous. Computed in
/// fp32 or wider. Differentiable.
at::Tensor swiglu(const KernelTable& kernels, const at::Tensor& gate, const at::Tensor& up,
                  OutputAgain again = {});

}  // namespace heddle::ops
