#include "ops/causal_conv1d/conv_decode.h"

#include "ops/autograd.h"
#include "ops/causal_conv1d/cpu/causal_conv1d.h"
#include "ops/causal_conv1d/kernels.h"
#include "ops/compute_type.h"

namespace heddle::ops {

at::Tensor conv_decode(const KernelTable& kernels, const at::Tensor& x, const at::Tensor& weight,
                       const at::Tensor& states, const CacheRows& rows) {
  check_conv("conv_decode", x, weight);
  TORCH_CHECK(states.dim() == 3 && states.size(1) == x.size(1) &&
                  states.size(2) == weight.size(1) - 1 && states.is_contiguous() &&
                  states.scalar_type() == x.scalar_type(),
              "conv_decode: states ", states.sizes(), " ", states.scalar_type(),
              " must be [slots,C,W-1] contiguous with x ", x.sizes(), " ", x.scalar_type(),
              " and weight ", weight.sizes());
  rows.check("conv_decode", x.size(0), states.size(0));
  const NoGradient guard;
  return kernels.get<ConvDecode>().forward(x, weight, states, rows);
}

void register_conv_decode(Registry& registry) {
  registry.add<ConvDecode>(KernelInfo::cpu("cpu.vector"), {conv_cpu::decode});
  registry.add<ConvDecode>(KernelInfo::reference(), {causal_conv1d_reference::decode},
                           decode_reference_rules<ConvDecode::Dims>("eight operators a layer"));
}

}  // namespace heddle::ops
