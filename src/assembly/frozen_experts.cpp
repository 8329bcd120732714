#include "assembly/frozen_experts.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/errors.h"
#include "base/text.h"
#include "ckpt/adapter_names.h"
#include "ops/autograd.h"
#include "ops/moe/frozen_experts.h"
#include "ops/moe/moe.h"

namespace heddle::assembly {
namespace {

/// The run asks for the operator (models/kernel_requests.cpp).
bool has_frozen_experts(const ModelRecipe& recipe) {
  return recipe.config.is_moe() && trains(recipe.purpose) &&
         std::holds_alternative<NewAdapters>(recipe.adapters);
}

/// adapter.modules_to_save names a module that the experts of a layer lie in.
bool trains_experts(const ModelRecipe& recipe) {
  const std::vector<bool> sparse = recipe.config.sparse_layers();
  for (std::size_t layer = 0; layer < sparse.size(); ++layer) {
    if (!sparse[layer]) continue;
    for (const char* matrix : {"gate_up_proj", "down_proj"}) {
      const std::string name =
          fmt::format("{}layers.{}.mlp.experts.{}", recipe.prefix, layer, matrix);
      const bool is_frozen = std::ranges::any_of(recipe.freeze, [&](const std::string& pattern) {
        return text::matches_glob(pattern, name);
      });
      if (!is_frozen && ckpt::is_saved_whole(recipe.saved_whole, name)) return true;
    }
  }
  return false;
}

/// Kernels of other builds are not known here.
bool multiplies_no_eight_bits(const std::string& kernel) {
  return std::ranges::any_of(
      ops::builtin_registry().entries(), [&](const ops::Registry::Entry& entry) {
        if (entry.info.op != ops::MoeExperts::kName || entry.info.name != kernel) return false;
        return !std::static_pointer_cast<const ops::MoeExperts::Functions>(entry.functions)
                    ->takes_eight_bits;
      });
}

/// Names the experts that no form but as_loaded keeps; empty: those of the recipe may be kept.
std::string why_as_loaded(const ModelRecipe& recipe, c10::ScalarType dtype, const comm::Mesh& mesh,
                          bool is_job_of_several_ranks) {
  // Training writes a model or a change of its experts from their weights.
  if (!std::get<NewAdapters>(recipe.adapters).target_parameters.empty())
    return "that have adapters (adapter.target_parameters)";
  if (trains_experts(recipe)) return "that are trained (adapter.modules_to_save)";
  if (!has_whole_experts(mesh)) return "that ranks divide (parallel.tp, cp, fsdp, ep)";
  // Other ranks would answer with other experts than these.
  if (recipe.generates && is_job_of_several_ranks)
    return "of a run that generates, in a job of several ranks,";
  if (dtype != c10::ScalarType::BFloat16)
    return fmt::format("in {} (model.dtype)", runtime::dtype_name(dtype));
  return "";
}

}  // namespace

bool has_whole_experts(const comm::Mesh& mesh) {
  using comm::Dim;
  return std::ranges::all_of(std::array{Dim::kTp, Dim::kCp, Dim::kFsdp, Dim::kEp},
                             [&](Dim dim) { return mesh.size(dim) == 1; });
}

void require_frozen_experts(const ModelRecipe& recipe, c10::ScalarType dtype,
                            const comm::Mesh& mesh, bool is_job_of_several_ranks) {
  const auto& named = recipe.kernels.named;
  const auto form = named.find(ops::FrozenExperts::kName);
  if (form == named.end()) return;
  if (!has_frozen_experts(recipe)) {
    throw_error<ConfigError>(
        "kernels.frozen_experts: is for the routed experts of a model that train.method lora "
        "trains, and {}; leave the key out",
        recipe.config.is_moe() ? "this run trains no adapters" : "this model has none");
  }
  if (form->second == kExpertsAsLoaded) return;
  if (form->second != kExpertsInEightBits) {
    throw_error<ConfigError>("kernels.frozen_experts: expected {} or {}, found '{}'",
                             kExpertsAsLoaded, kExpertsInEightBits, form->second);
  }
  if (const std::string which = why_as_loaded(recipe, dtype, mesh, is_job_of_several_ranks);
      !which.empty()) {
    throw_error<ConfigError>(
        "kernels.frozen_experts: experts {} are kept by '{}' alone, not by '{}'; leave the key out",
        which, kExpertsAsLoaded, form->second);
  }
  const auto products = named.find(ops::MoeExperts::kName);
  if (products == named.end() || !multiplies_no_eight_bits(products->second)) return;
  throw_error<ConfigError>(
      "kernels.frozen_experts: {}, which kernels.moe_experts names, multiplies no experts in 8 "
      "bits; leave kernels.moe_experts out",
      products->second);
}

bool may_keep_frozen_experts(const ModelRecipe& recipe, const comm::Mesh& mesh,
                             bool is_job_of_several_ranks) {
  const auto* adapters = std::get_if<NewAdapters>(&recipe.adapters);
  return trains(recipe.purpose) && adapters != nullptr && adapters->target_parameters.empty() &&
         recipe.saved_whole.empty() && has_whole_experts(mesh) &&
         !(recipe.generates && is_job_of_several_ranks) &&
         !recipe.kernels.named.contains("moe_experts");
}

void keep_frozen_experts(const ModelRecipe& recipe, ModelOnRanks& placed) {
  if (!has_frozen_experts(recipe)) return;
  const auto lay = placed.model->kernels().get<ops::FrozenExperts>().lay;
  if (lay == nullptr) return;
  // The early check knows a kernel that is named, of this build; this is the one that was chosen.
  if (!placed.model->kernels().get<ops::MoeExperts>().takes_eight_bits) {
    throw_error<ConfigError>(
        "kernels.frozen_experts: the kernel of moe_experts that was chosen multiplies no experts "
        "in 8 bits; leave kernels.moe_experts out, or kernels.frozen_experts");
  }
  const ops::NoGradient guard;
  for (const auto& layer : placed.model->layers()) {
    layer->visit_expert_weights([&](nn::ExpertWeights& weights) {
      nn::Parameter& parameter = weights.weight();
      if (!parameter.is_held()) return;  // another stage's
      lay(parameter.value());
      parameter.release_memory();
      parameter.set_held(false);
    });
  }
}

}  // namespace heddle::assembly
