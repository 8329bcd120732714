// npu_gemma_rms_norm multiplies by 1 + gamma in fp32, for zero-centred weights: npu_rms_norm, which
// takes plain ones, would want 1 + w rounded to bf16, which loses about a tenth of a weight of
// 0.02. The first has no backward: ours serves both.
#include <ATen/TensorOperators.h>

#include "ops/compute_type.h"
#include "ops/npu/call.h"
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

namespace {

/// 1 where a request does not say otherwise.
std::int64_t offset_of(const Dims& dims) {
  const auto offset = dims.find("norm_offset");
  return offset == dims.end() ? 1 : offset->second;
}

std::optional<std::string> refuse_plain(const Dims& dims) {
  if (offset_of(dims) == 1) return std::nullopt;
  return "the weights are not zero-centred";
}

std::optional<std::string> refuse_zero_centred(const Dims& dims) {
  if (offset_of(dims) == 0) return std::nullopt;
  return "the weights are zero-centred";
}

}  // namespace

void add(Registry& registry) {
  const auto add_kernel = [&](const char* name, auto refuse) {
    registry.add<RmsNorm>({.op = "",
                           .name = name,
                           .device = c10::DeviceType::PrivateUse1,
                           .dtypes = npu::dtypes(),
                           .is_reference = false,
                           .refuse = refuse,
                           .on_chip_bytes = {}},
                          {forward, rms_norm_reference::backward});
  };
  add_kernel("npu.gemma_rms_norm", refuse_plain);
  add_kernel("npu.rms_norm", refuse_zero_centred);
}

}  // namespace heddle::ops::rms_norm_npu
