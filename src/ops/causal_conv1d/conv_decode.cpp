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
  causal_conv1d_cuda::add_decode(registry);
  registry.add<ConvDecode>({.op = "",
                            .name = "cpu.vector",
                            .device = c10::DeviceType::CPU,
                            .dtypes = cpu_kernel_dtypes(),
                            .is_reference = false,
                            .refuse = {},
                            .on_chip_bytes = {}},
                           {conv_cpu::decode});
  registry.add<ConvDecode>(decode_reference_info("eight operators a layer"),
                           {causal_conv1d_reference::decode});
}

}  // namespace heddle::ops
