#pragma once

#include <utility>
#include <vector>

#include "ops/gated_delta_net/gated_delta_net.h"
#include "ops/gated_delta_net/gated_delta_rule_decode.h"

namespace heddle::ops {

/// TORCH_CHECKs shapes and dtypes of the gated delta rule's inputs in the name of `op`.
void check_heads(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const at::Tensor& g, const at::Tensor& beta);

/// Adds the kernels of gated_delta_rule_decode.
void register_gated_delta_rule_decode(Registry& registry);

/// The chunked form in ATen operators, any device; batched products over all chunks, one short loop
/// over the chunks of the longest sequence, nothing read back to the host.
namespace gated_delta_rule_reference {
GatedDeltaRuleForward forward(const GatedDeltaRule::Inputs& inputs, bool keep);
GatedDeltaRuleGradients backward(const GatedDeltaRule::Inputs& inputs,
                                 const GatedDeltaRuleForward& forward, const at::Tensor& grad_o,
                                 const at::Tensor& grad_final_state);
at::Tensor decode(const GatedDeltaRuleDecode::Inputs& inputs, const CacheRows& rows);
/// (I + lower)^-1 of strictly lower triangular lower [..., C, C], C 16 times a power of two: merges
/// of blocks of size 1, 2, 4, ..., all blocks up to 16 in one batch. No loop over rows.
at::Tensor unit_lower_inverse(const at::Tensor& lower);
}  // namespace gated_delta_rule_reference

/// The recurrence token by token in double, CPU tensors only: the definition that everything else
/// is tested against.
namespace gated_delta_rule_sequential {
GatedDeltaRuleForward forward(const GatedDeltaRule::Inputs& inputs, bool keep);
GatedDeltaRuleGradients backward(const GatedDeltaRule::Inputs& inputs,
                                 const GatedDeltaRuleForward& forward, const at::Tensor& grad_o,
                                 const at::Tensor& grad_final_state);
}  // namespace gated_delta_rule_sequential

namespace gdn_gates_reference {
std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& a, const at::Tensor& b,
                                          const at::Tensor& a_log, const at::Tensor& dt_bias);
std::vector<at::Tensor> backward(const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_log,
                                 const at::Tensor& dt_bias, const at::Tensor& g,
                                 const at::Tensor& beta, const at::Tensor& grad_g,
                                 const at::Tensor& grad_beta, bool wants_parameters);
}  // namespace gdn_gates_reference

namespace gated_rms_norm_reference {
std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& z,
                                          const at::Tensor& weight, double eps);
GatedRmsNorm::Gradients backward(const GatedRmsNorm::Backward& in);
}  // namespace gated_rms_norm_reference

}  // namespace heddle::ops
