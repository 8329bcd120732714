#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/gated_delta_net/cpu/norm.h"
#include "ops/gated_delta_net/cpu/rule.h"
#include "ops/gated_delta_net/gated_delta_net.h"
#include "ops/gated_delta_net/kernels.h"

namespace heddle::ops {

void register_gated_delta_net(Registry& registry) {
  registry.add<GatedDeltaRule>(KernelInfo::cpu("cpu.chunk"), {gdn_cpu::forward, gdn_cpu::backward},
                               {.refuse = gdn_cpu::refuse});
  registry.add<GatedDeltaRule>(KernelInfo::reference(), {gated_delta_rule_reference::forward,
                                                         gated_delta_rule_reference::backward});
  // The exact recurrence, to compare with.
  KernelInfo sequential = KernelInfo::cpu("cpu.sequential");
  sequential.dtypes = reference_dtypes();
  sequential.only_by_name = true;
  registry.add<GatedDeltaRule>(
      sequential, {gated_delta_rule_sequential::forward, gated_delta_rule_sequential::backward});
  register_gated_delta_rule_decode(registry);
  registry.add<GdnGates>(KernelInfo::reference(),
                         {gdn_gates_reference::forward, gdn_gates_reference::backward});
  registry.add<GatedRmsNorm>(KernelInfo::cpu("cpu.vector"),
                             {gdn_cpu::norm_forward, gdn_cpu::norm_backward},
                             {.refuse = gdn_cpu::refuse_norm});
  registry.add<GatedRmsNorm>(KernelInfo::reference(), {gated_rms_norm_reference::forward,
                                                       gated_rms_norm_reference::backward});
}

}  // namespace heddle::ops
