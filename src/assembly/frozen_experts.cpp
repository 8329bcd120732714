#include "assembly/frozen_experts.h"

#include "base/errors.h"
#include "ops/autograd.h"
#include "ops/moe/frozen_experts.h"
#include "ops/moe/moe.h"

namespace heddle::assembly {
namespace {

/// Training writes a model or a change of its experts from their weights.
void require_only_read(const nn::ExpertWeights& weights, const nn::Parameter& parameter,
                       const ModelOnRanks& placed) {
  const char* reason = nullptr;
  if (placed.context.mesh.world()) {
    reason = "in a job of several ranks";
  } else if (parameter.trainable() || placed.adapters->of(weights) != nullptr) {
    reason = "that are trained or have adapters";
  }
  if (reason == nullptr) return;
  throw_error<ConfigError>(
      "kernels.frozen_experts: {} is of experts {}, which only 'as_loaded' keeps; leave the key "
      "out",
      parameter.name(), reason);
}

}  // namespace

bool may_keep_frozen_experts(const ModelRecipe& recipe, const comm::Mesh& mesh) {
  const auto* adapters = std::get_if<NewAdapters>(&recipe.adapters);
  return trains(recipe.purpose) && adapters != nullptr && adapters->target_parameters.empty() &&
         recipe.saved_whole.empty() && !mesh.world() &&
         !recipe.kernels.named.contains("moe_experts");
}

void keep_frozen_experts(const ModelRecipe& recipe, ModelOnRanks& placed) {
  if (!recipe.config.is_moe() || !trains(recipe.purpose) ||
      !std::holds_alternative<NewAdapters>(recipe.adapters))
    return;
  const auto lay = placed.model->kernels().get<ops::FrozenExperts>().lay;
  if (lay == nullptr) return;
  if (!placed.model->kernels().get<ops::MoeExperts>().takes_eight_bits) {
    throw_error<ConfigError>(
        "kernels.frozen_experts: the kernel that kernels.moe_experts names multiplies no experts "
        "in 8 bits; leave kernels.moe_experts out");
  }
  const ops::NoGradient guard;
  for (const auto& layer : placed.model->layers()) {
    layer->visit_expert_weights([&](nn::ExpertWeights& weights) {
      nn::Parameter& parameter = weights.weight();
      require_only_read(weights, parameter, placed);
      lay(parameter.value());
      parameter.release_memory();
      parameter.set_held(false);
    });
  }
}

}  // namespace heddle::assembly
