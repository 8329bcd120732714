#include <ATen/ops/cat.h>

#include "ops/npu/call.h"
#include "ops/npu/kernels.h"
#include "ops/swiglu/kernels.h"

namespace heddle::ops::swiglu_npu {
namespace {

/// [T,2F] with gate's columns first; a view where the two already stand so.
at::Tensor joined(const at::Tensor& gate, const at::Tensor& up) {
  const std::int64_t T = gate.size(0), F = gate.size(1);
  // is_alias_of() would ask for the address of the device's memory.
  const bool is_one = gate.storage().unsafeGetStorageImpl() == up.storage().unsafeGetStorageImpl();
  const bool are_columns = is_one && gate.stride(0) == 2 * F && up.stride(0) == 2 * F &&
                           gate.stride(1) == 1 && up.stride(1) == 1 &&
                           up.storage_offset() == gate.storage_offset() + F;
  if (are_columns) return gate.as_strided({T, 2 * F}, {2 * F, 1}, gate.storage_offset());
  return at::cat({gate, up}, -1);
}

at::Tensor forward(const at::Tensor& gate, const at::Tensor& up) {
  if (gate.numel() == 0) return swiglu_reference::forward(gate, up);
  return npu::call("npu_swiglu", {{"input", joined(gate, up)}})[0];
}

std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& gate, const at::Tensor& up,
                                           const at::Tensor& grad_y) {
  if (gate.numel() == 0) return swiglu_reference::backward(gate, up, grad_y);
  const at::Tensor grad = npu::call("npu_swiglu_backward", {{"grad_output", grad_y.contiguous()},
                                                            {"input", joined(gate, up)}})[0];
  const std::int64_t F = gate.size(1);
  return {grad.narrow(1, 0, F), grad.narrow(1, F, F)};
}

}  // namespace

}  // namespace heddle::ops::swiglu_npu

namespace heddle::ops::npu {

void add_swiglu(Registry& registry) {
  using namespace swiglu_npu;
  registry.add<Swiglu>(KernelInfo::ascend("npu.swiglu", dtypes()), {forward, backward});
}

}  // namespace heddle::ops::npu
