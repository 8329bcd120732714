#include "rl/reference.h"

#include "assembly/from_config.h"

namespace heddle::rl {
namespace {

constexpr const char* kState = "reference/";

}  // namespace

Reference::Reference(const config::RunConfig& config, train::Setup& setup)
    : every_(config.rl.reference.sync_every), setup_(setup) {
  const assembly::ModelOnRanks& placed = setup.placed;
  if (keeps_values()) {
    for (const nn::Parameter* parameter : placed.trainable)
      kept_.push_back(parameter->owned().detach().clone());
    return;
  }
  const bool is_base_model = placed.adapters != nullptr && placed.saved_whole.empty();
  if (!is_base_model) place_frozen(config);
}

void Reference::place_frozen(const config::RunConfig& config) {
  assembly::ModelRecipe recipe =
      assembly::recipe_of_run(config, setup_.placed.model->config(), setup_.placed.source);
  recipe.purpose = assembly::Purpose::kScore;
  recipe.generates = false;
  recipe.adapters = {};
  // Forms of experts are for a model with adapters (assembly/frozen_experts.h).
  recipe.kernels.named.erase("frozen_experts");
  recipe.freeze.clear();
  recipe.saved_whole.clear();
  frozen_ =
      std::make_unique<assembly::ModelOnRanks>(assembly::place(recipe, setup_.placed.context));
}

std::vector<train::RowScore> Reference::scores(const Score& score) {
  if (!keeps_values()) return score(frozen_ ? *frozen_ : setup_.placed, /*with_adapters=*/false);
  // Adapters that are new change nothing before a step.
  const bool with_adapters = step_ > 0 || setup_.placed.start != nullptr;
  exchange();
  std::vector<train::RowScore> scores = score(setup_.placed, with_adapters);
  exchange();
  return scores;
}

/// In place, so that addresses stay and one tensor at a time takes memory.
void Reference::exchange() {
  for (std::size_t i = 0; i < kept_.size(); ++i) {
    at::Tensor owned = setup_.placed.trainable[i]->owned();
    const at::Tensor policy = owned.clone();
    owned.copy_(kept_[i]);
    kept_[i].copy_(policy);
  }
  if (setup_.placed.sharding) setup_.placed.sharding->publish();
}

void Reference::updated(std::int64_t step) {
  if (!follows() || step % every_ != 0) return;
  for (std::size_t i = 0; i < kept_.size(); ++i)
    kept_[i].copy_(setup_.placed.trainable[i]->owned());
  step_ = step;
}

std::vector<ckpt::TensorPart> Reference::state(bool with_copies) const {
  std::vector<ckpt::TensorPart> parts;
  // The start of a run is in its files.
  if (!follows()) return parts;
  for (std::size_t i = 0; i < kept_.size(); ++i) {
    const nn::Parameter& parameter = *setup_.placed.trainable[i];
    if (parameter.is_copy() && !with_copies) continue;
    for (nn::Box& box : parameter.boxes(kept_[i])) {
      parts.push_back({kState + parameter.name(), std::move(box.tensor),
                       std::move(box.global.offset), parameter.global_shape()});
    }
  }
  return parts;
}

}  // namespace heddle::rl
