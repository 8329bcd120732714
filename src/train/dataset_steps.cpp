#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "objective/from_config.h"
#include "train/step_source.h"

namespace heddle::train {
namespace {

data::LoaderOptions loader_options(const config::RunConfig& config, const comm::Mesh& mesh) {
  data::LoaderOptions options;
  options.global_batch_size = config.train.global_batch_size;
  options.micro_batch_tokens = config.train.micro_batch_tokens;
  options.packing = config.data.packing;
  options.max_length = config.data.max_length;
  options.shuffle = config.data.shuffle;
  options.seed = config.train.seed;
  // A number of steps may need more epochs than the default one.
  options.epochs = config.train.max_steps > 0 && !config.is_set("train.epochs")
                       ? 0
                       : static_cast<std::int64_t>(std::ceil(config.train.epochs));
  options.max_steps = config.train.max_steps;
  options.rank = static_cast<int>(mesh.data_rank());
  options.world = static_cast<int>(mesh.data_size());
  return options;
}

/// The loader of the run; a part of an epoch ends it after as many steps.
std::unique_ptr<data::Loader> make_loader(const std::shared_ptr<const data::Dataset>& train,
                                          const config::RunConfig& config, const comm::Mesh& mesh) {
  data::LoaderOptions options = loader_options(config, mesh);
  auto loader = std::make_unique<data::Loader>(train, options);
  const double epochs = config.train.epochs;
  if (options.epochs == 0 || epochs == std::floor(epochs)) return loader;
  const auto steps = static_cast<std::int64_t>(
      std::ceil(epochs * static_cast<double>(loader->info().steps_per_epoch)));
  options.max_steps = options.max_steps > 0 ? std::min(options.max_steps, steps) : steps;
  return std::make_unique<data::Loader>(train, options);
}

class DatasetSteps : public StepSource {
 public:
  DatasetSteps(const config::RunConfig& config, const Setup& setup, objective::Objective& objective)
      : config_(config),
        setup_(setup),
        objective_(objective),
        loader_(make_loader(setup.train, config, setup.placed.context.mesh)) {}

  const data::LoaderInfo& info() const override { return loader_->info(); }
  std::string summary() const override { return setup_.train->report().summary(); }
  std::optional<data::Step> next() override { return loader_->next(); }
  nlohmann::json cursor() override { return loader_->cursor(); }
  void seek(const nlohmann::json& cursor) override { loader_->seek(cursor); }
  bool has_evaluation() const override { return setup_.eval != nullptr; }
  Evaluation evaluate() override {
    data::EvaluationLoader::Options options;
    options.micro_batch_tokens = config_.train.micro_batch_tokens;
    options.rank = static_cast<int>(setup_.placed.context.mesh.data_rank());
    options.world = static_cast<int>(setup_.placed.context.mesh.data_size());
    return objective_.evaluate(setup_.eval, options);
  }

 private:
  const config::RunConfig& config_;
  const Setup& setup_;
  objective::Objective& objective_;
  std::unique_ptr<data::Loader> loader_;
};

}  // namespace

Subject dataset_subject(const config::RunConfig& config, Setup& setup) {
  Subject subject{objective::make_objective(config, setup.placed), nullptr};
  subject.steps = std::make_unique<DatasetSteps>(config, setup, *subject.objective);
  return subject;
}

}  // namespace heddle::train
