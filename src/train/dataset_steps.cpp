#include <memory>
#include <utility>

#include "objective/from_config.h"
#include "train/loader_options.h"
#include "train/step_source.h"

namespace heddle::train {
namespace {

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
