#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/gated_delta_net/cpu/norm.h"
#include "ops/gated_delta_net/cpu/rule.h"
#include "ops/gated_delta_net/gated_delta_net.h"
#include "ops/gated_delta_net/kernels.h"

namespace heddle::ops {

void register_gated_delta_net(Registry& registry) {
  gated_delta_rule_cuda::add(registry);
  gated_delta_rule_npu::add(registry);
  const KernelInfo reference{.op = "",
                             .name = "reference",
                             .device = {},
                             .dtypes = reference_dtypes(),
                             .is_reference = true,
                             .refuse = {},
                             .on_chip_bytes = {}};
  KernelInfo chunk{.op = "",
                   .name = "cpu.chunk",
                   .device = c10::DeviceType::CPU,
                   .dtypes = cpu_kernel_dtypes(),
                   .is_reference = false,
                   .refuse = gdn_cpu::refuse,
                   .on_chip_bytes = {}};
  registry.add<GatedDeltaRule>(chunk, {gdn_cpu::forward, gdn_cpu::backward});
  registry.add<GatedDeltaRule>(
      reference, {gated_delta_rule_reference::forward, gated_delta_rule_reference::backward});
  // Never chosen unless asked for: the exact recurrence, to compare with.
  KernelInfo sequential = reference;
  sequential.name = "cpu.sequential";
  sequential.device = c10::DeviceType::CPU;
  registry.add<GatedDeltaRule>(
      sequential, {gated_delta_rule_sequential::forward, gated_delta_rule_sequential::backward});
  register_gated_delta_rule_decode(registry);
  gdn_gates_cuda::add(registry);
  gated_rms_norm_cuda::add(registry);
  registry.add<GdnGates>(reference, {gdn_gates_reference::forward, gdn_gates_reference::backward});
  KernelInfo norm = chunk;
  norm.name = "cpu.vector";
  norm.refuse = gdn_cpu::refuse_norm;
  registry.add<GatedRmsNorm>(norm, {gdn_cpu::norm_forward, gdn_cpu::norm_backward});
  registry.add<GatedRmsNorm>(
      reference, {gated_rms_norm_reference::forward, gated_rms_norm_reference::backward});
}

}  // namespace heddle::ops
