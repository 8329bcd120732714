// npu_gemma_rms_norm multiplies by 1 + gamma in fp32, for zero-centred weights: npu_rms_norm, which
// takes plain ones, would want 1 + w rounded to bf16, which loses about a tenth of a weight of
// 0.02. The first has no backward: ours serves both.
#include <ATen/TensorOperators.h>

#include "ops/compute_type.h"
#include "ops/npu/call.h"
#include "ops/npu/kernels.h"
#include "ops/rms_norm/kernels.h"

namespace heddle::ops::rms_norm_npu {

RmsNorm::Forward forward(const at::Tensor& x, const at::Tensor& residual, const NormWeight& weight,
                         double eps) {
  if (x.numel() == 0) return rms_norm_reference::forward(x, residual, weight, eps);
  RmsNorm::Forward result;
  if (residual.defined()) result.sum = x + residual;
  const at::Tensor& input = residual.defined() ? result.sum : x;
  const auto out = npu::call(weight.offset == 1 ? "npu_gemma_rms_norm" : "npu_rms_norm",
                             {{"input", input.contiguous()},
                              {"gamma", weight.value.to(x.scalar_type())},
                              {"epsilon", eps}});
  result.y = out[0];
  result.rstd = out[1].to(compute_type(x)).reshape(x.sizes().slice(0, x.dim() - 1));
  return result;
}

}  // namespace heddle::ops::rms_norm_npu

namespace heddle::ops::npu {

void add_rms_norm(Registry& registry) {
  using namespace rms_norm_npu;
  registry.add<RmsNorm>(KernelInfo::ascend("npu.rms_norm", dtypes()),
                        {forward, rms_norm_reference::backward});
}

}  // namespace heddle::ops::npu
