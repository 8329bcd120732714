#pragma once

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
  struct Backward {
    at::Tensor input;  ///< x, or x + residual.
    NormWeight weight;
    at::Tensor rstd, grad_y;
    /// The gradient from another reader of y, unless undefined.
    at::Tensor grad_y_2 = {};
    /// The gradient along the residual stream, unless undefined: added to the input's gradient.
    at::Tensor grad_sum = {};
    bool wants_weight = true, wants_y = false;
  };
  struct Gradients {
    at::Tensor input;
    at::Tensor weight;  ///< May be undefined if it is not wanted.
    at::Tensor y;       ///< The output again; undefined if it is not wanted.
  };
  struct Functions {
    /// `residual` may be undefined.
    Forward (*forward)(const at::Tensor& x, const at::Tensor& residual, const NormWeight& weight,
                       double eps);
    Gradients (*backward)(const Backward& in);
    /// Whether the backward takes a second gradient of y and gives y again where that is wanted.
    bool does_all_in_one_pass = false;
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

struct NormBranches {
  at::Tensor y, y_2, stream;
};
/// rms_norm_branch with y twice, for two readers: their gradients too are added inside the
/// backward.
NormBranches rms_norm_branches(const KernelTable& kernels, const at::Tensor& x,
                               const NormWeight& weight, double eps, OutputAgain again = {});

/// sum = x + residual, y = rms_norm(sum): {y, sum}. Differentiable.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const KernelTable& kernels, const at::Tensor& x,
                                               const at::Tensor& residual, const NormWeight& weight,
                                               double eps);

}  // namespace heddle::ops
