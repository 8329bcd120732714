#pragma once

#include "ops/gradient_halves.h"
#include "ops/norm_weight.h"
#include "ops/registry.h"

namespace heddle::ops {

/// cos and sin of the rotary angles, [T, rot/2] each, fp32 (fp64 if `dtype` is fp64) then rounded
/// to `dtype` and held in fp32/fp64, as transformers does. position_ids [T], or [3,T] (temporal,
/// height, width) with `mrope_section` (three counts, interleaved as in Qwen3.5); inv_freq_i =
/// theta^(-2i/rot).
std::pair<at::Tensor, at::Tensor> rotary_tables(const at::Tensor& position_ids,
                                                std::int64_t rotary_dim, double theta,
                                                const std::vector<std::int64_t>& mrope_section,
                                                c10::ScalarType dtype);

struct QkNormRope {
  static constexpr const char* kName = "qk_norm_rope";
  struct Dims {
    std::int64_t head_dim = 0, rotary_dim = 0;
  };
  struct Functions {
    /// y [T,n,D] and rstd [T,n] for one of q or k; x may have any strides over T and n, unit stride
    /// over D.
    std::pair<at::Tensor, at::Tensor> (*forward)(const at::Tensor& x, const NormWeight& weight,
                                                 const at::Tensor& cos, const at::Tensor& sin,
                                                 double eps);
    /// Gradients of x and of the weight, which may be undefined if it is not wanted.
    std::pair<at::Tensor, at::Tensor> (*backward)(const at::Tensor& x, const NormWeight& weight,
                                                  const at::Tensor& cos, const at::Tensor& sin,
                                                  const at::Tensor& rstd, const at::Tensor& grad_y,
                                                  bool wants_weight);
    /// The gradient of x into the given memory; gives that of the weight. Null: it takes none.
    at::Tensor (*backward_into)(const at::Tensor& x, const NormWeight& weight,
                                const at::Tensor& cos, const at::Tensor& sin,
                                const at::Tensor& rstd, const at::Tensor& grad_y, bool wants_weight,
                                at::Tensor grad_x) = nullptr;
  };
};

/// RMSNorm over the head dimension, as rms_norm, then rotary embedding of its first 2 x cos.size(1)
/// entries (rotate-half inside them), the rest unchanged. x [T,n,D], weight [D], cos/sin [T,rot/2].
/// Differentiable in x and weight. `halves`, unless null: those of which x is the first.
at::Tensor qk_norm_rope(const KernelTable& kernels, const at::Tensor& x, const NormWeight& weight,
                        const at::Tensor& cos, const at::Tensor& sin, double eps,
                        const std::shared_ptr<GradientHalves>& halves = nullptr);

}  // namespace heddle::ops
