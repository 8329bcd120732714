#include "train/result.h"

#include <set>
#include <string>
#include <utility>

#include "assembly/from_config.h"
#include "base/errors.h"
#include "ckpt/hf_adapter.h"
#include "ckpt/label_names.h"
#include "ckpt/sentence_transformers.h"
#include "ckpt/training_checkpoint.h"
#include "config/config.h"
#include "hub/cache.h"
#include "models/registry.h"
#include "train/model_card.h"
#include "train/sources.h"
#include "train/vocabulary.h"

namespace heddle::train {
namespace {

/// The configuration that a checkpoint was written with, for one process without a device.
config::RunConfig config_of(const ckpt::TrainingCheckpoint& checkpoint,
                            const std::filesystem::path& base) {
  const std::string path = checkpoint.info().path.string();
  config::RunConfig config =
      config::parse(checkpoint.state().at("config").get<std::string>(), path + "/state.json", {},
                    config::Completeness::kPartial);
  if (!base.empty()) {
    if (config.model.tokenizer == config.model.path) config.model.tokenizer = base.string();
    config.model.path = base.string();
  } else if (!std::filesystem::exists(config.model.path)) {
    throw_error<ConfigError>(
        "{}: the model that the run started from, model.path {}, is not here; say where it is with "
        "--base DIR",
        path, config.model.path);
  }
  config.parallel = {};
  // Values that the run began with are of no use to one that is over.
  config.adapter.path.clear();
  config.kernels = {};
  config.kernels.fallback = config::Fallback::kAllow;
  return config;
}

/// The objects of the run's model without storage.
Setup setup_of(const config::RunConfig& config) {
  Setup setup;
  const auto source =
      std::make_shared<const ckpt::ModelDirectory>(ckpt::ModelDirectory::open(config.model.path));
  assembly::ModelRecipe recipe =
      assembly::recipe_of_run(config, assembly::read_config(*source), source);
  recipe.weights = assembly::Weights::kNone;
  RunTokenizer tokenizer = load_tokenizer(config, recipe.config.vocab_size);
  setup.tokenizer = tokenizer.tokenizer;
  setup.tokenizer_source = std::move(tokenizer.source);
  setup.sources = contents_of(*source, setup.tokenizer_source);
  recipe.config.vocab_size = vocabulary_rows(config, *setup.tokenizer, recipe.config.vocab_size);
  setup.placed = assembly::place(recipe, assembly::context_of_shapes(config));
  return setup;
}

}  // namespace

void write_result(const config::RunConfig& config, const Setup& setup,
                  const std::filesystem::path& output, const ResultOptions& options,
                  const ckpt::ReadWhole& read) {
  ckpt::Files card = {
      {"README.md", model_card(config, setup.placed, setup.placed.adapters != nullptr)}};
  if (setup.placed.model->head() == models::Head::kEmbed) {
    for (auto& file :
         ckpt::sentence_transformers_files(setup.placed.model->config().hidden_size,
                                           config.model.normalize, config.data.max_length))
      card.push_back(std::move(file));
  }
  if (setup.placed.adapters) {
    if (setup.placed.model->head() == models::Head::kClassify && !config.data.labels.empty())
      card.emplace_back(ckpt::kLabelNamesFile, ckpt::label_names_text(config.data.labels));
    ckpt::export_adapter(*setup.placed.model, *setup.placed.adapters, setup.placed.saved_whole,
                         *setup.placed.source, hub::model_name(config.model.path),
                         setup.tokenizer_source, output, options.overwrite, read, card);
    return;
  }
  ckpt::ModelWriterOptions writer;
  writer.overwrite = options.overwrite;
  writer.max_shard_bytes = options.max_shard_bytes;
  writer.files = card;
  writer.label_names = config.data.labels;
  ckpt::export_model(*setup.placed.model, setup.placed.adapters.get(), *setup.placed.source,
                     setup.tokenizer_source, output, writer, read);
}

config::RunConfig export_checkpoint(const std::filesystem::path& checkpoint,
                                    const std::filesystem::path& base,
                                    const std::filesystem::path& output,
                                    const ResultOptions& options) {
  const auto saved = ckpt::TrainingCheckpoint::open(checkpoint);
  config::RunConfig config = config_of(saved, base);
  Setup setup = setup_of(config);
  require_same_sources(saved.state(), setup.sources, saved.info().path.string());
  const std::set<const nn::Parameter*> trained(setup.placed.trainable.begin(),
                                               setup.placed.trainable.end());
  // It holds what is frozen, too, where the source does not: a new head, or what was trained
  // before.
  const auto is_saved = [&](const nn::Parameter& parameter) {
    return trained.contains(&parameter) || saved.has("weights/" + parameter.name());
  };
  if (setup.placed.adapters) {
    for (nn::Parameter* parameter : setup.placed.model->parameters()) {
      if (!trained.contains(parameter) && is_saved(*parameter))
        setup.placed.saved_whole.push_back(parameter);
    }
  }
  write_result(config, setup, output, options, [&](const nn::Parameter& parameter) {
    return is_saved(parameter) ? saved.whole("weights/" + parameter.name())
                               : ckpt::read_from_directory(*setup.placed.source, parameter);
  });
  return config;
}

}  // namespace heddle::train
