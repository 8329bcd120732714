#include "plan/parameters.h"

#include <algorithm>
#include <memory>
#include <variant>

#include "adapters/lora.h"
#include "assembly/from_config.h"
#include "assembly/model_on_ranks.h"
#include "assembly/trainable.h"
#include "ckpt/hf_adapter.h"
#include "config/objective.h"
#include "models/model.h"

namespace heddle::plan {
namespace {

using comm::Dim;

/// Labels of a classifier whose data are counted at its start: as few as there may be.
constexpr std::int64_t kUnknownLabels = 2;

/// The whole model with its adapters, without storage and with marks on what is trained.
assembly::ModelOnRanks model_of_shapes(const config::RunConfig& config,
                                       const models::Config& model) {
  const assembly::ModelRecipe recipe = recipe_of_plan(config, model);
  const runtime::Context shapes = assembly::context_of_shapes(config);
  models::ModelOptions options;
  options.head = recipe.head;
  options.num_labels = recipe.num_labels;
  options.kernel_policy = recipe.kernels;
  assembly::ModelOnRanks placed;
  placed.model = std::make_unique<models::Model>(recipe.config, recipe.prefix, shapes, options);
  if (const auto* wanted = std::get_if<assembly::NewAdapters>(&recipe.adapters)) {
    adapters::LoraOptions of_adapters = wanted->options;
    of_adapters.excluded = model.weights.not_adapted;
    placed.adapters =
        std::make_unique<adapters::LoraSet>(ckpt::adaptable(*placed.model), wanted->targets,
                                            wanted->target_parameters, of_adapters, shapes);
  }
  assembly::choose_trainable(recipe, placed);
  return placed;
}

double elements_of(const nn::Parameter& parameter) { return as_double(parameter.numel()); }
double trained_of(const nn::Parameter& parameter) {
  return parameter.trainable() ? elements_of(parameter) : 0;
}

/// Adds what the low-rank change of one matrix of routed experts reads and writes besides
/// (ops/moe/cuda). A token has a row for each of its experts, and itself where they share a factor.
void add_expert_adapter(LayerWork& work, nn::ExpertWeights& weights,
                        const nn::LowRankExperts& change, double experts_per_token) {
  const double in = as_double(weights.in_features()), out = as_double(weights.out_features());
  const auto is_shared = [](const nn::Parameter& factor) { return factor.global_shape()[0] == 1; };
  const bool is_first = weights.hidden_side() == nn::ExpertWeights::HiddenSide::kInput;
  // x in; backward x in, the change of dx out and added, and x made again: rows of hidden states
  // are read and written, products of SwiGLU written.
  if (is_shared(change.a())) {
    work.forward += in;
    work.backward += 3 * in;
  } else {
    work.forward += experts_per_token * in;
    work.backward += experts_per_token * (5 + (is_first ? 2 : 1)) * in;
  }
  // The change of y out and added, a shared factor's by its product; backward dy in for both
  // factors.
  if (is_shared(change.b())) {
    work.forward += 2 * out;
    work.backward += 2 * out;
  } else {
    work.forward += experts_per_token * 4 * out;
    work.backward += experts_per_token * 2 * out;
  }
}

void count_adapters(Step& step, std::size_t layer, models::DecoderLayer& of,
                    const adapters::LoraSet& set, bool merges) {
  const auto count = [&](auto& product) {
    set.visit_factors(product, [&](nn::Parameter& factor) {
      step.adapters[layer].add(factor);
      step.trained[layer].add(factor);
    });
    if (merges && set.of(product) != nullptr) step.adapted[layer].add(product.weight());
  };
  of.visit_linears(count);
  of.visit_expert_weights([&](nn::ExpertWeights& weights) {
    count(weights);
    if (const nn::LowRankExperts* const change = set.of(weights)) {
      const double experts = as_double(step.model.layers[layer].moe->num_experts_per_tok);
      add_expert_adapter(step.layers[layer], weights, *change, experts);
    }
  });
}

void count_layer(Step& step, std::size_t layer, models::DecoderLayer& of) {
  of.visit_parameters([&](nn::Parameter& parameter) {
    step.parameters[layer].add(parameter);
    if (parameter.trainable()) step.trained[layer].add(parameter);
  });
  LayerWork& work = step.layers[layer];
  of.visit_linears(
      [&](nn::Linear& linear) { work.trained_products += trained_of(linear.weight()); });
  of.visit_expert_weights([&](nn::ExpertWeights& weights) {
    const double chosen = as_double(step.model.layers[layer].moe->num_experts_per_tok);
    work.trained_experts += trained_of(weights.weight()) * chosen / as_double(weights.experts());
  });
}

void count_ends(Step& step, models::Model& model) {
  step.has_logits = model.head() == models::Head::kLanguageModel;
  step.embedding = elements_of(model.embedding_weight());
  step.trained_embedding = trained_of(model.embedding_weight());
  if (step.has_logits && !model.tied()) {
    step.head = elements_of(model.head_weight());
    step.trained_head = trained_of(model.head_weight());
  }
  if (model.head() == models::Head::kClassify) {
    step.classifier = elements_of(model.score().weight());
    step.trained_classifier = trained_of(model.score().weight());
  }
}

}  // namespace

void ParameterCount::add(const nn::Parameter& parameter) {
  const bool is_divided = std::ranges::any_of(
      parameter.placement(), [](const nn::Shard& shard) { return shard.mesh_dim == Dim::kTp; });
  (parameter.is_expert() ? experts : is_divided ? divided : replicated) += elements_of(parameter);
}

assembly::ModelRecipe recipe_of_plan(config::RunConfig config, const models::Config& model) {
  config.kernels = {};
  config.kernels.fallback = config::Fallback::kAllow;
  assembly::ModelRecipe recipe = assembly::recipe_of_run(config, model);
  if (recipe.num_labels == 0) recipe.num_labels = kUnknownLabels;
  // Files of the checkpoint name the text model, and train.freeze goes by them.
  for (const std::string& prefix : model.weights.prefixes) {
    const bool is_named = std::ranges::any_of(
        recipe.freeze, [&](const std::string& pattern) { return pattern.starts_with(prefix); });
    if (prefix.empty() || !is_named) continue;
    recipe.prefix = prefix;
    break;
  }
  return recipe;
}

void count_parameters(Step& step, const config::RunConfig& config) {
  const assembly::ModelOnRanks placed = model_of_shapes(config, step.model);
  const bool merges =
      config::objective_of(config) == config::Objective::kPolicy && config.rollout.merge_adapter;
  auto& layers = placed.model->layers();
  for (auto* counts : {&step.parameters, &step.adapters, &step.trained, &step.adapted})
    counts->resize(layers.size());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    count_layer(step, i, *layers[i]);
    if (placed.adapters) count_adapters(step, i, *layers[i], *placed.adapters, merges);
  }
  if (placed.adapters && merges)
    step.merged = assembly::merged_parameters(*placed.model, *placed.adapters);
  count_ends(step, *placed.model);
  if (step.trained_embedding > 0) return;
  step.first_trained =
      std::ranges::find_if(step.trained, [](const ParameterCount& c) { return c.all() > 0; }) -
      step.trained.begin();
}

}  // namespace heddle::plan
