#include "ops/gated_delta_net/gated_delta_rule_decode.h"

#include <cmath>

#include "ops/autograd.h"
#include "ops/causal_conv1d/conv_decode.h"
#include "ops/causal_conv1d/kernels.h"
#include "ops/compute_type.h"
#include "ops/gated_delta_net/cpu/rule.h"
#include "ops/gated_delta_net/kernels.h"

namespace heddle::ops {

namespace {

bool is_state_dtype(const at::Tensor& states, const at::Tensor& q) {
  return states.scalar_type() == compute_type(q) || states.scalar_type() == at::kBFloat16;
}

}  // namespace

at::Tensor gated_delta_rule_decode(const KernelTable& kernels,
                                   const GatedDeltaRuleDecode::Inputs& inputs,
                                   const CacheRows& rows) {
  GatedDeltaRuleDecode::Inputs in = inputs;
  check_heads("gated_delta_rule_decode", in.q, in.k, in.v, in.g, in.beta);
  TORCH_CHECK(in.states.dim() == 4 && in.states.size(1) == in.v.size(1) &&
                  in.states.size(2) == in.q.size(2) && in.states.size(3) == in.v.size(2) &&
                  in.states.is_contiguous() && is_state_dtype(in.states, in.q),
              "gated_delta_rule_decode: states ", in.states.sizes(), " ", in.states.scalar_type(),
              " must be [slots,Hv,K,V] contiguous ", compute_type(in.q), " or BFloat16 with q ",
              in.q.sizes(), " and v ", in.v.sizes());
  rows.check("gated_delta_rule_decode", in.q.size(0), in.states.size(0));
  if (in.scale == 0) in.scale = 1 / std::sqrt(static_cast<double>(in.q.size(2)));
  const NoGradient guard;
  return kernels.get<GatedDeltaRuleDecode>().forward(in, rows);
}

at::Tensor gated_delta_net_decode(const KernelTable& kernels, const GatedDeltaNetDecode& in,
                                  const CacheRows& rows) {
  const GatedDeltaRuleDecode::Functions& functions = kernels.get<GatedDeltaRuleDecode>();
  const NoGradient guard;
  if (functions.net != nullptr && functions.takes_net(in)) {
    check_conv("gated_delta_net_decode", in.qkv, in.conv_weight);
    const std::int64_t Hv = in.z.size(1), V = in.z.size(2), K = in.states.size(2);
    TORCH_CHECK(in.states.is_contiguous() && in.conv_states.is_contiguous() &&
                    in.qkv.size(1) == 2 * in.num_key_heads * K + Hv * V &&
                    in.states.size(1) == Hv && in.states.size(3) == V &&
                    is_state_dtype(in.states, in.qkv) && in.conv_states.size(1) == in.qkv.size(1) &&
                    in.conv_states.size(2) == in.conv_weight.size(1) - 1,
                "gated_delta_net_decode: qkv ", in.qkv.sizes(), ", z ", in.z.sizes(), ", states ",
                in.states.sizes(), " and ", in.conv_states.sizes(), " do not belong to one layer");
    rows.check("gated_delta_net_decode", in.qkv.size(0), in.states.size(0));
    return functions.net(in, rows);
  }
  const auto [q, k, v] =
      split_qkv(conv_decode(kernels, in.qkv, in.conv_weight, in.conv_states, rows),
                in.num_key_heads, in.states.size(2), in.z.size(1), in.z.size(2));
  const auto [g, beta] = gdn_gates(kernels, in.a, in.b, in.a_log, in.dt_bias);
  const at::Tensor o = gated_delta_rule_decode(kernels, {q, k, v, g, beta, in.states}, rows);
  return gated_rms_norm(kernels, o, in.z, in.norm_weight, in.norm_eps).flatten(1);
}

void register_gated_delta_rule_decode(Registry& registry) {
  registry.add<GatedDeltaRuleDecode>(KernelInfo::cpu("cpu.vector"), {gdn_cpu::decode},
                                     {.refuse = gdn_cpu::refuse});
  registry.add<GatedDeltaRuleDecode>(
      KernelInfo::reference(), {gated_delta_rule_reference::decode},
      decode_reference_rules<GatedDeltaRuleDecode::Dims>("fifteen operators a layer"));
}

}  // namespace heddle::ops
