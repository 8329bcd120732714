#pragma once

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
    /// Gradients of x and weight.
    std::pair<at::Tensor, at::Tensor> (*backward)(const at::Tensor& x, const NormWeight& weight,
                                                  const at::Tensor& cos, const at::Tensor& sin,
                                                  const at::Tensor& rstd, const at::Tensor& grad_y);
  };
};

/// RMSNorm over the head dimension, as rms_norm, then rotary embedding of its first 2 x cos.size(1)
/// entries (rotate-half inside them), the rest unchanged. x [T,n,D], weight [D], cos/sin [T,rot/2].
/// Differentiable in x and weight.
at::Tensor qk_norm_rope(const KernelTable& kernels, const at::Tensor& x, const NormWeight& weight,
                        const at::Tensor& cos, const at::Tensor& sin, double eps);

}  // namespace heddle::ops
