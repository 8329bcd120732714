#include "assembly/merged_adapter.h"

#include "base/errors.h"
#include "ckpt/hf_adapter.h"

namespace heddle::assembly {

std::vector<MergedParameter> merged_parameters(Model& model, const adapters::LoraSet& adapters) {
  std::vector<MergedParameter> merged;
  const auto add = [&](const nn::Parameter& parameter) {
    merged.push_back({parameter.name(), parameter.is_expert()});
  };
  const adapters::Adaptable parts = ckpt::adaptable(model);
  parts.visit_linears([&](nn::Linear& layer) {
    if (adapters.of(layer) != nullptr) add(layer.weight());
  });
  parts.visit_expert_weights([&](nn::ExpertWeights& experts) {
    if (adapters.of(experts) == nullptr) return;
    // Factors that experts share are divided as dense weights are.
    adapters.visit_factors(experts, add);
    add(experts.weight());
  });
  return merged;
}

void require_whole(const std::vector<MergedParameter>& merged, const comm::Mesh& mesh) {
  using comm::Dim;
  for (const MergedParameter& parameter : merged) {
    // parallel::Sharding gathers them over these ranks.
    const std::int64_t shards =
        parameter.is_expert ? mesh.size(Dim::kEfsdp) : mesh.size(Dim::kCp) * mesh.size(Dim::kFsdp);
    if (shards == 1) continue;
    throw_error<ConfigError>(
        "merge_adapter: this rank does not hold {} whole between passes; expected parallel.fsdp 1 "
        "or, in rl, ranks that only generate (rl.rollout_ranks); for adapters on experts "
        "parallel.ep as large as tp",
        parameter.name);
  }
}

}  // namespace heddle::assembly
