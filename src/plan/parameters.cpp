#include "plan/parameters.h"

#include <algorithm>

#include "assembly/from_config.h"
#include "assembly/model_on_ranks.h"
#include "config/objective.h"

namespace heddle::plan {
namespace {

using comm::Dim;

/// Labels of a classifier whose data are counted at its start: as few as there may be.
constexpr std::int64_t kUnknownLabels = 2;

/// Places the whole model with its adapters, without storage and with marks on what is trained.
assembly::ModelOnRanks model_of_shapes(const config::RunConfig& config,
                                       const models::Config& model) {
  assembly::ModelRecipe recipe = recipe_of_plan(config, model);
  recipe.pipeline_chunks = 1;  // one rank has all layers
  return assembly::place(recipe, assembly::context_of_shapes(config));
}

double elements_of(const nn::Parameter& parameter) { return as_double(parameter.numel()); }
double trained_of(const nn::Parameter& parameter) {
  return parameter.trainable() ? elements_of(parameter) : 0;
}

void add(ParameterCount& count, const nn::Parameter& parameter) {
  const bool is_divided = std::ranges::any_of(
      parameter.placement(), [](const nn::Shard& shard) { return shard.mesh_dim == Dim::kTp; });
  (parameter.is_expert() ? count.experts
   : is_divided          ? count.divided
                         : count.replicated) += elements_of(parameter);
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

void count_adapters(Step& step, std::size_t i, models::DecoderLayer& layer,
                    const adapters::LoraSet& set, bool merges) {
  const auto count = [&](auto& product) {
    set.visit_factors(product, [&](nn::Parameter& factor) {
      add(step.adapters[i], factor);
      add(step.trained[i], factor);
    });
    if (merges && set.of(product) != nullptr) add(step.adapted[i], product.weight());
  };
  layer.visit_linears(count);
  layer.visit_expert_weights([&](nn::ExpertWeights& weights) {
    count(weights);
    if (const nn::LowRankExperts* const change = set.of(weights)) {
      const double experts = as_double(step.model.layers[i].moe->num_experts_per_tok);
      add_expert_adapter(step.layers[i], weights, *change, experts);
    }
  });
}

void count_layer(Step& step, std::size_t i, models::DecoderLayer& layer) {
  layer.visit_parameters([&](nn::Parameter& parameter) {
    add(step.parameters[i], parameter);
    if (parameter.trainable()) add(step.trained[i], parameter);
  });
  LayerWork& work = step.layers[i];
  layer.visit_linears(
      [&](nn::Linear& linear) { work.trained_products += trained_of(linear.weight()); });
  layer.visit_expert_weights([&](nn::ExpertWeights& weights) {
    const double chosen = as_double(step.model.layers[i].moe->num_experts_per_tok);
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

/// The prefix that the patterns of a run's parameters begin with, as files of its checkpoint name
/// the text model; `usual` where none of them has one.
std::string prefix_of(const config::RunConfig& config, const std::vector<std::string>& prefixes,
                      const std::string& usual) {
  const config::AdapterSection& adapter = config.adapter;
  for (const std::string& prefix : prefixes) {
    if (prefix.empty()) continue;
    for (const auto* patterns : {&config.train.freeze, &adapter.targets, &adapter.target_parameters,
                                 &adapter.modules_to_save}) {
      if (std::ranges::any_of(
              *patterns, [&](const std::string& pattern) { return pattern.starts_with(prefix); }))
        return prefix;
    }
  }
  return usual;
}

}  // namespace

assembly::ModelRecipe recipe_of_plan(config::RunConfig config, const models::Config& model) {
  config.kernels = {};
  config.kernels.fallback = config::Fallback::kAllow;
  assembly::ModelRecipe recipe = assembly::recipe_of_run(config, model);
  if (recipe.num_labels == 0) recipe.num_labels = kUnknownLabels;
  recipe.prefix = prefix_of(config, model.weights.prefixes, recipe.prefix);
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
