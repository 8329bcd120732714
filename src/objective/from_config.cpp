#include "objective/from_config.h"

#include "base/errors.h"
#include "config/objective.h"
#include "objective/classification.h"
#include "objective/embedding.h"
#include "objective/language_model.h"
#include "objective/preference.h"
#include "objective/reward.h"

namespace heddle::objective {
namespace {

/// Two answers to a prompt.
data::GroupShape answers(const config::DataFields& fields, bool learns) {
  return {.texts = {fields.chosen, fields.rejected}, .prompt = fields.prompt, .learns = learns};
}

}  // namespace

data::ReaderOptions reader_options(const config::RunConfig& config) {
  const config::DataFields& fields = config.data.fields;
  data::ReaderOptions options;
  options.task = data::Task::kGroup;
  switch (config::objective_of(config)) {
    case config::Objective::kAuto:
    case config::Objective::kLanguageModel:
    case config::Objective::kPolicy:
      options.task = data::Task::kLanguageModel;
      break;
    case config::Objective::kClassification:
      options.task =
          config.model.num_labels == 1 ? data::Task::kRegression : data::Task::kClassification;
      break;
    case config::Objective::kContrastive:
      options.group = {.texts = {fields.query, fields.positive}, .more = fields.negatives};
      break;
    case config::Objective::kDpo:
      options.group = answers(fields, /*learns=*/true);
      break;
    case config::Objective::kReward:
      options.group = answers(fields, /*learns=*/false);
      break;
  }
  return options;
}

std::unique_ptr<Objective> make_objective(const config::RunConfig& config,
                                          const assembly::ModelOnRanks& placed) {
  switch (config::objective_of(config)) {
    case config::Objective::kAuto:
    case config::Objective::kLanguageModel:
      return std::make_unique<LanguageModel>(placed);
    case config::Objective::kClassification:
      return std::make_unique<Classification>(placed);
    case config::Objective::kContrastive:
      return std::make_unique<Contrastive>(
          placed, ContrastiveOptions{config.train.infonce_temperature, config.model.normalize},
          config.train.global_batch_size);
    case config::Objective::kDpo:
      return std::make_unique<Preference>(
          placed, config.dpo,
          ReferenceOptions{config.train.output_dir, config.train.micro_batch_tokens});
    case config::Objective::kReward:
      return std::make_unique<Reward>(placed);
    case config::Objective::kPolicy:
      throw ConfigError("train.objective policy learns from what it generates: run `heddle rl`");
  }
  throw InternalError("an objective without a class");
}

}  // namespace heddle::objective
