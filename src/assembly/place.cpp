#include <utility>

#include "assembly/frozen_experts.h"
#include "assembly/model_on_ranks.h"
#include "assembly/model_units.h"
#include "assembly/put_on.h"
#include "assembly/same_weights.h"
#include "assembly/trainable.h"
#include "base/log.h"
#include "ckpt/hf_adapter.h"
#include "ckpt/sentence_transformers.h"
#include "ops/autograd.h"
#include "ops/moe/frozen_experts.h"

namespace heddle::assembly {
namespace {

bool runs(const ModelRecipe& recipe) {
  return recipe.purpose != Purpose::kStore && recipe.weights != Weights::kNone;
}

void require_same_files(const ModelRecipe& recipe, const comm::Mesh& mesh) {
  if (!mesh.world() || recipe.weights != Weights::kDirectory) return;
  std::vector<comm::Fact> facts = facts_of(*recipe.source);
  const auto* files = std::get_if<AdapterFiles>(&recipe.adapters);
  const auto* trained = std::get_if<NewAdapters>(&recipe.adapters);
  if (const AdapterFiles adapter = files ? *files : trained ? trained->start : AdapterFiles()) {
    const std::vector<comm::Fact> more = facts_of(*adapter);
    facts.insert(facts.end(), more.begin(), more.end());
  }
  comm::require_agreement(*mesh.world(), "model", facts);
}

std::unique_ptr<Model> make_model(const ModelRecipe& recipe, const runtime::Context& context) {
  models::ModelOptions options;
  options.head = recipe.head;
  options.num_labels = recipe.num_labels;
  options.duties.use = trains(recipe.purpose) ? ops::Use::kTraining : ops::Use::kGeneration;
  options.duties.generates = recipe.generates || recipe.purpose == Purpose::kGenerate;
  if (const auto* adapters = std::get_if<NewAdapters>(&recipe.adapters))
    options.duties.adapter_rank = adapters->options.rank;
  // Rows of the base model and of its adapters meet where they generate.
  options.duties.several_adapters =
      recipe.purpose == Purpose::kTenants ||
      (options.duties.generates && !std::holds_alternative<std::monostate>(recipe.adapters));
  options.auxiliary_loss = recipe.auxiliary_loss;
  options.kernel_policy = recipe.kernels;
  if (!may_keep_frozen_experts(recipe, context.mesh, context.mesh.world() != nullptr))
    options.kernel_policy.wishes.erase(ops::FrozenExperts::kName);
  options.context_method = recipe.context_method;
  return std::make_unique<Model>(recipe.config, recipe.prefix, context, options);
}

/// Gives this rank its stages and its rows of their parameters, without values.
void divide(const ModelRecipe& recipe, ModelOnRanks& placed) {
  const comm::Mesh& mesh = placed.context.mesh;
  placed.stages = parallel::StagePlan::balanced(recipe.config, mesh.size(comm::Dim::kPp),
                                                recipe.pipeline_chunks);
  parallel::hold_stages(*placed.model, placed.stages, mesh.coordinate(comm::Dim::kPp));
  if (mesh.world_size() == 1) {
    placed.model->allocate();
  } else {
    placed.sharding = shard_model(*placed.model, recipe.summing);
  }
}

/// Numbers that start a model about as Model::initialize does, in no time: on the host a model of
/// billions of parameters takes minutes.
void fill_on_device(Model& model) {
  const ops::NoGradient guard;
  model.visit_parameters([&](nn::Parameter& parameter) {
    if (!parameter.is_held()) return;
    at::Tensor data = parameter.owned();
    const std::string& name = parameter.name();
    if (name.ends_with(".A_log")) {
      data.uniform_(0.01, 16).log_();
    } else if (name.ends_with(".dt_bias") || name.ends_with("linear_attn.norm.weight")) {
      data.fill_(1);
    } else if (data.dim() == 1) {
      data.fill_(1 - model.config().norm_offset);  // neutral norms
    } else {
      data.normal_(0, model.config().initializer_range);
    }
  });
}

void fill(const ModelRecipe& recipe, ModelOnRanks& placed) {
  const std::uint64_t seed = placed.context.seed;
  switch (recipe.weights) {
    case Weights::kNone:
      return;
    case Weights::kDirectory:
      placed.load_report = ckpt::load_model(*recipe.source, *placed.model, seed);
      return;
    case Weights::kRandom:
      return placed.model->initialize(seed);
    case Weights::kRandomOnDevice:
      return fill_on_device(*placed.model);
  }
}

void put_adapters_on(const ModelRecipe& recipe, ModelOnRanks& placed) {
  const auto divide = [&](adapters::LoraSet& adapters) {
    if (placed.sharding) shard_adapters(*placed.model, adapters, *placed.sharding);
  };
  if (const auto* adapters = std::get_if<NewAdapters>(&recipe.adapters)) {
    placed.adapters = divided(*adapters, placed);
    placed.start = adapters->start;
    if (recipe.weights != Weights::kNone) start(*adapters, placed, *placed.adapters);
  } else if (const auto* files = std::get_if<AdapterFiles>(&recipe.adapters)) {
    placed.adapters = ckpt::load_adapter(
        **files, *placed.model, placed.source ? placed.source->path().string() : "", divide);
  }
}

/// Connects this rank's stages with their neighbours.
std::unique_ptr<parallel::Pipeline> make_pipeline(const ModelRecipe& recipe, ModelOnRanks& placed) {
  const runtime::Context& context = placed.context;
  parallel::BlockRunnerOptions options;
  options.recompute = recipe.recompute;
  options.sharding = placed.sharding.get();
  if (recipe.offload_activations && !context.device.is_cpu()) options.offload_from = context.device;
  if (trains(recipe.purpose)) options.ends = end_units(*placed.model);
  std::vector<parallel::BlockEntry> entries = block_entries(*placed.model, placed.adapters.get());
  for (parallel::BlockEntry& entry : entries)
    entry.takes_adapters = recipe.purpose == Purpose::kTenants;
  return std::make_unique<parallel::Pipeline>(
      context.mesh, placed.stages, entries, placed.model->embedding_weight().trainable(), options);
}

}  // namespace

ModelOnRanks place(const ModelRecipe& recipe, const runtime::Context& context) {
  check_layout(recipe, context.mesh);
  require_frozen_experts(recipe, context.dtype, context.mesh, context.mesh.world() != nullptr);
  require_same_files(recipe, context.mesh);
  if (runs(recipe) && recipe.head == Head::kEmbed && recipe.source)
    ckpt::require_last_token_embeddings(recipe.source->path());
  ModelOnRanks placed;
  placed.context = context;
  placed.source = recipe.source;
  placed.label_names = recipe.label_names;
  placed.model = make_model(recipe, context);
  if (runs(recipe)) {
    for (const std::string& line : placed.model->kernels().warnings()) log::warning("{}", line);
  }
  divide(recipe, placed);
  fill(recipe, placed);
  put_adapters_on(recipe, placed);
  choose_trainable(recipe, placed);
  if (placed.sharding) {
    if (recipe.weights != Weights::kNone) placed.sharding->publish();
    placed.sharding->freeze_untrained();
  }
  if (runs(recipe)) keep_frozen_experts(recipe, placed);
  if (runs(recipe)) placed.pipeline = make_pipeline(recipe, placed);
  return placed;
}

}  // namespace heddle::assembly
