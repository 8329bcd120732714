#pragma once

#include <tuple>
#include <utility>

#include "ops/norm_weight.h"
#include "ops/output_again.h"
#include "ops/registry.h"

namespace heddle::ops {

struct RmsNorm {
  static constexpr const char* kName = "rms_norm";
  struct Dims {
    std::int64_t dim = 0;  ///< Elements of a row.
  };
  struct Forward {
    at::Tensor y;
    at::Tensor sum;   ///< x + residual; undefined without a residual.
    at::Tensor rstd;  ///< One per row, fp32 (fp64).
  };
  struct Functions {
    /// `residual` may be undefined.
    Forward (*forward)(const at::Tensor& x, const at::Tensor& residual, const NormWeight& weight,
                       double eps);
    /// `input` is x, or x + residual. `grad_sum` (may be undefined) is what flows back along the
    /// residual stream and is added to the gradient of the input. Returns the gradients of the
    /// input and of the weight.
    std::pair<at::Tensor, at::Tensor> (*backward)(const at::Tensor& input, const NormWeight& weight,
                                                  const at::Tensor& rstd, const at::Tensor& grad_y,
                                                  const at::Tensor& grad_sum);
    /// Gradients and y again, in one pass; null: in two.
    std::tuple<at::Tensor, at::Tensor, at::Tensor> (*backward_again)(
        const at::Tensor& input, const NormWeight& weight, const at::Tensor& rstd,
        const at::Tensor& grad_y, const at::Tensor& grad_sum) = nullptr;
  };
};

/// y = x * rsqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, computed in fp32 or
/// wider and cast once at the end. x [...,D], weight [D]. Differentiable. Source: Qwen3_5RMSNorm
/// (offset 1), Qwen3RMSNorm (offset 0, which casts before the weight).
at::Tensor rms_norm(const KernelTable& kernels, const at::Tensor& x, const NormWeight& weight,
                    double eps);

/// {rms_norm(x), x}: the residual stream goes on from the second, so that its gradient is added
/// inside the backward of the norm and not by a pass of its own. Differentiable.
std::pair<at::Tensor, at::Tensor> rms_norm_branch(const KernelTable& kernels, const at::Tensor& x,
                                                  const NormWeight& weight, double eps,
                                                  OutputAgain again = {});

/// sum = x + residual, y = rms_norm(sum): {y, sum}. Differentiable.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const KernelTable& kernels, const at::Tensor& x,
                                               const at::Tensor& residual, const NormWeight& weight,
                                               double eps);

}  // namespace heddle::ops
