// npu_gemma_rms_norm, or npu_rms_norm for plain weights, over the heads, then npu_rotary_mul on
// their first entries. Between the two the values are rounded to the activations' dtype, as
// transformers does.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <fmt/format.h>

#include "ops/npu/call.h"
#include "ops/npu/kernels.h"
#include "ops/rms_norm/kernels.h"
#include "ops/rotary/kernels.h"

namespace heddle::ops::qk_norm_rope_npu {
namespace {

/// x [T,n,D] with its first 2 x half entries turned; the operator takes [1,T,n,2 half] and angles
/// [1,T,1,2 half].
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const std::int64_t turned = 2 * cos.size(1);
  const auto angles = [&](const at::Tensor& t) {
    return at::cat({t, t}, -1).to(x.scalar_type()).unsqueeze(1).unsqueeze(0);
  };
  const at::Tensor y =
      npu::call("npu_rotary_mul", {{"input", x.narrow(-1, 0, turned).contiguous().unsqueeze(0)},
                                   {"r1", angles(cos)},
                                   {"r2", angles(sin)}})[0]
          .squeeze(0);
  return turned == x.size(-1) ? y : at::cat({y, x.narrow(-1, turned, x.size(-1) - turned)}, -1);
}

std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const NormWeight& weight,
                                          const at::Tensor& cos, const at::Tensor& sin,
                                          double eps) {
  if (x.numel() == 0) return qk_norm_rope_reference::forward(x, weight, cos, sin, eps);
  const RmsNorm::Forward norm = rms_norm_npu::forward(x, {}, weight, eps);
  return {rotate(norm.y, cos, sin), norm.rstd};
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& x, const NormWeight& weight,
                                           const at::Tensor& cos, const at::Tensor& sin,
                                           const at::Tensor& rstd, const at::Tensor& grad_y,
                                           bool wants_weight) {
  if (x.numel() == 0)
    return qk_norm_rope_reference::backward(x, weight, cos, sin, rstd, grad_y, wants_weight);
  RmsNorm::Backward in{x, weight, rstd, rotate(grad_y, cos, -sin)};
  in.wants_weight = wants_weight;
  const RmsNorm::Gradients g = rms_norm_reference::backward(in);
  return {g.input, g.weight};
}

std::optional<std::string> refuse(const QkNormRope::Dims& dims) {
  if (dims.rotary_dim % 2 != 0 || dims.rotary_dim >= 896)
    return fmt::format("rotary_dim {} is not even and below 896", dims.rotary_dim);
  return std::nullopt;
}

}  // namespace

}  // namespace heddle::ops::qk_norm_rope_npu

namespace heddle::ops::npu {

void add_qk_norm_rope(Registry& registry) {
  using namespace qk_norm_rope_npu;
  registry.add<QkNormRope>(KernelInfo::ascend("npu.rotary_mul", dtypes()), {forward, backward},
                           {.refuse = refuse});
}

}  // namespace heddle::ops::npu
