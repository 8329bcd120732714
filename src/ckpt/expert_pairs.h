#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ckpt/adapter_directory.h"

namespace heddle::ckpt {

/// Adapters on the projections of single experts ("mlp.experts.3.up_proj", from transformers
/// versions that kept experts apart), as one adapter on the stacked matrix of all experts: gate and
/// up are the two halves of its outputs, each with its own part of the rank.
struct StackedExperts {
  std::string module;     ///< text spelling, "model.layers.0.mlp.experts"
  std::string parameter;  ///< "gate_up_proj" or "down_proj"
  std::int64_t rank = 0;  ///< Rank of an expert's pair; where it has less, the rest is zero.
  std::vector<const LoraPair*> pairs;

  /// A [E, rank, in] and B [E, out, rank] of scaling 1 for `experts` experts. Throws ModelError for
  /// an expert beyond them and for shapes that do not fit.
  std::pair<at::Tensor, at::Tensor> factors(std::int64_t experts, std::int64_t out,
                                            std::int64_t in) const;
};

/// Takes the pairs of single experts out of `pairs`.
std::vector<StackedExperts> stack_experts(std::vector<const LoraPair*>& pairs);

}  // namespace heddle::ckpt
