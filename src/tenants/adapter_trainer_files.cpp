// Checkpoints of a run of several adapters, and what it writes at its end.
#include <set>
#include <string>

#include "base/errors.h"
#include "ckpt/hf_adapter.h"
#include "ckpt/shared_verification.h"
#include "config/config.h"
#include "hub/cache.h"
#include "ops/autograd.h"
#include "tenants/adapter_trainer.h"
#include "train/model_card.h"
#include "train/resume.h"
#include "train/sources.h"

namespace heddle::tenants {
namespace {

/// "weights/model.x" of adapter a -> "weights/a/model.x".
std::string name_in_checkpoint(const std::string& name, const std::string& adapter) {
  const std::size_t slash = name.find('/');
  return name.substr(0, slash + 1) + adapter + name.substr(slash);
}

}  // namespace

std::vector<ckpt::TensorPart> AdapterTrainer::state(bool with_copies) const {
  std::vector<ckpt::TensorPart> parts;
  for (const Adapter& adapter : adapters_) {
    for (ckpt::TensorPart& part : adapter.optimizer->state(with_copies)) {
      part.name = name_in_checkpoint(part.name, adapter.run.name);
      parts.push_back(std::move(part));
    }
  }
  return parts;
}

void AdapterTrainer::save() {
  ckpt::CheckpointState state;
  for (Adapter& adapter : adapters_) {
    adapter.loop.optimizer_steps = adapter.optimizer->steps();
    nlohmann::ordered_json& own = state.state["adapters"][adapter.run.name];
    adapter.loop.write(own);
    own["config"] = config::dump_yaml(adapter.run.config);
  }
  state.state["rounds"] = rounds_;
  state.state["sources"] = sources_;
  state.state["kernels"] = base_.model->kernels().lines();
  state.parts = this->state(/*with_copies=*/false);
  if (!base_.sharding) {
    for (ckpt::TensorPart& part : state.parts)
      state.tensors.emplace_back(std::move(part.name), std::move(part.tensor));
    state.parts.clear();
  }
  checkpoints_->save(rounds_, std::move(state));
  saved_rounds_ = rounds_;
  last_checkpoint_ = checkpoints_->directory() / ckpt::step_name(rounds_);
}

/// Refuses and names what is another in the configuration of an adapter since the checkpoint.
void AdapterTrainer::check_same_run(const nlohmann::ordered_json& saved, const Adapter& adapter,
                                    const std::string& checkpoint) {
  const config::RunConfig before =
      config::parse(saved.at("config").get<std::string>(), checkpoint + "/state.json", {},
                    config::Completeness::kPartial);
  const config::RunConfig& now = adapter.run.config;
  try {
    train::check_same_dtype(before, now, adapter.loop.step);
    train::check_same_optimizer(before, now, adapter.loop.step);
  } catch (const ConfigError& error) {
    throw_error<ConfigError>("adapter {}: {}", adapter.run.name, error.what());
  }
  for (const std::string& difference : config::differences(before, now)) {
    log::warning("adapter {}: the configuration changed since the checkpoint: {}", adapter.run.name,
                 difference);
  }
}

void AdapterTrainer::resume() {
  const std::string& mode = shared().train.resume;
  const auto latest =
      ckpt::latest_complete_checkpoint(checkpoints_->directory(), base_.context.mesh.world_group());
  if (mode != "auto" && mode != "never") {
    throw_error<ConfigError>(
        "{}: a run of several adapters continues its own newest checkpoint; set auto or never",
        config::where(shared(), "train.resume"));
  }
  if (!latest) return;
  if (mode == "never") {
    throw_error<ConfigError>(
        "train.resume is 'never', but {} already holds the checkpoint {}; continue it with "
        "train.resume=auto or choose another train.output_dir",
        shared().train.output_dir, latest->filename().string());
  }
  const ops::NoGradient guard;
  const auto checkpoint =
      ckpt::TrainingCheckpoint::open(*latest, ckpt::TrainingCheckpoint::Verify::kSizes);
  const auto saved = checkpoint.state().find("adapters");
  if (saved == checkpoint.state().end()) {
    throw_error<ConfigError>(
        "{} is a checkpoint of a run without adapters:; choose another train.output_dir",
        latest->string());
  }
  if (saved->size() != adapters_.size()) {
    throw_error<ConfigError>(
        "{} holds {} adapters and this run has {}; choose another "
        "train.output_dir",
        latest->string(), saved->size(), adapters_.size());
  }
  train::require_same_sources(checkpoint.state(), sources_, latest->string());
  for (Adapter& adapter : adapters_) {
    const auto own = saved->find(adapter.run.name);
    if (own == saved->end()) {
      throw_error<ConfigError>("adapters: '{}' is not in {}; choose another train.output_dir",
                               adapter.run.name, latest->string());
    }
    adapter.loop = train::LoopState::read(*own, latest->string());
    check_same_run(*own, adapter, latest->string());
    std::set<std::string> factors;
    adapter.factors->visit_parameters(
        [&](const nn::Parameter& factor) { factors.insert(factor.name()); });
    train::require_no_other_weights(checkpoint, factors, "weights/" + adapter.run.name + "/");
    for (ckpt::TensorPart& part : adapter.optimizer->state(/*with_copies=*/true)) {
      part.name = name_in_checkpoint(part.name, adapter.run.name);
      checkpoint.copy_part(part);
    }
    adapter.optimizer->set_steps(adapter.loop.optimizer_steps);
    adapter.loader->seek(adapter.loop.cursor);
    adapter.paced = train::paced(adapter.run.config, adapter.loader->info());
    if (adapter.loop.step > 0) adapter.observer->on_resume(adapter.loop.step, *latest);
  }
  if (base_.sharding) base_.sharding->publish();
  rounds_ = saved_rounds_ = checkpoint.state().at("rounds").get<std::int64_t>();
  last_checkpoint_ = *latest;
}

void AdapterTrainer::export_all() const {
  if (base_.context.mesh.rank() > 0) return;
  std::shared_ptr<const ckpt::TrainingCheckpoint> checkpoint;
  if (base_.sharding) {
    checkpoint = std::make_shared<const ckpt::TrainingCheckpoint>(
        ckpt::TrainingCheckpoint::open(last_checkpoint_, ckpt::TrainingCheckpoint::Verify::kSizes));
  }
  for (const Adapter& adapter : adapters_) {
    if (!adapter.failure.empty()) continue;
    const std::string& name = adapter.run.name;
    const ckpt::ReadWhole from_checkpoint = [&](const nn::Parameter& factor) {
      return checkpoint->whole(name_in_checkpoint("weights/" + factor.name(), name));
    };
    const ckpt::Path output = ckpt::Path(shared().train.output_dir) / "final" / name;
    config::RunConfig own = adapter.run.config;
    own.train.output_dir = output.string();
    std::filesystem::create_directories(output.parent_path());
    ckpt::export_adapter(*base_.model, *adapter.factors, {}, *base_.source,
                         hub::model_name(shared().model.path), tokenizer_source_, output,
                         /*overwrite=*/true,
                         checkpoint ? from_checkpoint : ckpt::ReadWhole(ckpt::read_from_memory),
                         {{"README.md", train::model_card(own, base_, /*is_adapter=*/true)}});
  }
}

}  // namespace heddle::tenants
