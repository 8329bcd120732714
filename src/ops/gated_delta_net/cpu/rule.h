#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ops/gated_delta_net/gated_delta_rule_decode.h"

/// "cpu.chunk": the chunked gated delta rule in vectors, parallel over sequences and heads, fp32
/// (bf16 in fp32, fp64 in fp64). Memory besides the outputs: e [Hv,T,V] and a state every 64 tokens
/// when a backward follows, and about 1.5 MiB per thread at two heads of 128.
namespace heddle::ops::gdn_cpu {

inline constexpr std::int64_t kMaxHeadDim = 1024;

std::optional<std::string> refuse(const GatedDeltaRule::Dims& dims);
GatedDeltaRuleForward forward(const GatedDeltaRule::Inputs& inputs, bool keep);
GatedDeltaRuleGradients backward(const GatedDeltaRule::Inputs& inputs,
                                 const GatedDeltaRuleForward& forward, const at::Tensor& grad_o,
                                 const at::Tensor& grad_final_state);
at::Tensor decode(const GatedDeltaRuleDecode::Inputs& inputs, const CacheRows& rows);

}  // namespace heddle::ops::gdn_cpu
