// Saves a run and continues it.
#include <algorithm>
#include <iterator>
#include <set>
#include <string>

#include "base/errors.h"
#include "base/log.h"
#include "ckpt/shared_verification.h"
#include "config/config.h"
#include "ops/autograd.h"
#include "train/resume.h"
#include "train/sources.h"
#include "train/trainer.h"

namespace heddle::train {
namespace {

constexpr const char* kWeights = "weights/";

/// Whether this rank saves its rows of an untrained parameter. Frozen values that stay whole have
/// no owner (parallel::Sharding::freeze_untrained): the first replica saves them.
bool saves(const nn::Parameter& parameter, const comm::Mesh& mesh) {
  if (parameter.is_copy()) return false;
  const bool is_owned = !parameter.owned().is_alias_of(parameter.value());
  return is_owned || mesh.coordinate(parameter.is_expert() ? comm::Dim::kEdp : comm::Dim::kDp) == 0;
}

/// Names of all weights, those of other ranks too.
std::set<std::string> names_of_weights(const assembly::ModelOnRanks& placed) {
  std::set<std::string> names;
  for (const nn::Parameter* parameter : placed.model->parameters()) names.insert(parameter->name());
  if (placed.adapters) {
    placed.adapters->visit_parameters(
        [&](const nn::Parameter& factor) { names.insert(factor.name()); });
  }
  return names;
}

}  // namespace

void Trainer::resume() {
  const std::string& mode = config_.train.resume;
  const comm::Group everybody = setup_.placed.context.mesh.world_group();
  const bool is_named = mode != "auto" && mode != "never";
  const bool is_own =
      everybody.any(is_named && std::filesystem::weakly_canonical(mode).parent_path() ==
                                    std::filesystem::weakly_canonical(checkpoints_->directory()));
  std::optional<ckpt::Path> latest;
  if (!is_own) latest = ckpt::latest_complete_checkpoint(checkpoints_->directory(), everybody);
  if (!is_named) {
    if (!latest) return;
    if (mode == "never") {
      throw_error<ConfigError>(
          "train.resume is 'never', but {} already holds the checkpoint {}; continue it with "
          "train.resume=auto or "
          "choose another train.output_dir",
          config_.train.output_dir, latest->filename().string());
    }
    restore(*latest);
    observer_.on_resume(first_step_, *latest);
    return;
  }
  if (latest) {
    throw_error<ConfigError>(
        "train.resume names {}, but {} holds checkpoints of its own ({}); choose another "
        "train.output_dir",
        mode, config_.train.output_dir, latest->filename().string());
  }
  ckpt::verify_together(mode, everybody);
  restore(mode);
  // Later checkpoints belong to a past that is being rewritten.
  checkpoints_->remove_newer_than(first_step_);
  observer_.on_resume(first_step_, mode);
}

void Trainer::restore(const ckpt::Path& path) {
  const ops::NoGradient guard;
  const auto checkpoint =
      ckpt::TrainingCheckpoint::open(path, ckpt::TrainingCheckpoint::Verify::kSizes);
  const nlohmann::ordered_json& state = checkpoint.state();
  const LoopState saved = LoopState::read(state, path.string());
  const config::RunConfig before = config::parse(state.at("config").get<std::string>(),
                                                 "checkpoint", {}, config::Completeness::kPartial);
  check_same_dtype(before, config_, saved.step);
  check_same_method(before, config_, saved.step);
  check_same_objective(before, config_, saved.step);
  check_same_optimizer(before, config_, saved.step);
  require_same_sources(state, setup_.sources, path.string());
  for (const std::string& difference : config::differences(before, config_)) {
    log::warning("the configuration changed since the checkpoint: {}", difference);
  }
  require_no_other_weights(checkpoint, names_of_weights(setup_.placed), kWeights);
  const std::vector<ckpt::TensorPart> parts = learner_.optimizer().state(/*with_copies=*/true);
  std::set<std::string> trained;
  for (const ckpt::TensorPart& part : parts)
    if (part.name.starts_with(kWeights)) trained.insert(part.name);
  require_all_weights(checkpoint, trained);
  for (const ckpt::TensorPart& part : parts) checkpoint.copy_part(part);
  for (const ckpt::TensorPart& part : steps_.state(/*with_copies=*/true))
    checkpoint.copy_part(part);
  steps_.load(checkpoint);
  restore_kept(checkpoint);
  if (setup_.placed.sharding) setup_.placed.sharding->publish(/*with_frozen=*/true);
  learner_.optimizer().set_steps(saved.optimizer_steps);
  learner_.spikes().restore(saved.recent_norms);
  loop_ = saved;
  first_step_ = saved.step;
  last_saved_ = first_step_;
  last_checkpoint_ = path;
  steps_.seek(saved.cursor);
}

std::vector<ckpt::TensorPart> Trainer::state(bool with_copies) const {
  std::vector<ckpt::TensorPart> parts = learner_.optimizer().state(with_copies);
  for (const nn::Parameter* parameter : kept_) {
    if (!parameter->is_held()) continue;
    if (!with_copies && !saves(*parameter, setup_.placed.context.mesh)) continue;
    for (nn::Box& box : parameter->boxes(parameter->owned())) {
      parts.push_back({kWeights + parameter->name(), std::move(box.tensor),
                       std::move(box.global.offset), parameter->global_shape()});
    }
  }
  std::vector<ckpt::TensorPart> of_source = steps_.state(with_copies);
  std::ranges::move(of_source, std::back_inserter(parts));
  return parts;
}

void Trainer::keep(nn::Parameter& parameter) {
  if (std::find(kept_.begin(), kept_.end(), &parameter) != kept_.end()) return;
  kept_.push_back(&parameter);
  if (setup_.placed.adapters) setup_.placed.saved_whole.push_back(&parameter);
}

void Trainer::save(std::int64_t step, std::optional<nlohmann::json> cursor) {
  ckpt::CheckpointState state;
  loop_.step = step;
  loop_.optimizer_steps = learner_.optimizer().steps();
  loop_.cursor = cursor ? std::move(*cursor) : steps_.cursor();
  loop_.write(state.state);
  state.state["seed"] = config_.train.seed;
  state.state["kernels"] = setup_.placed.model->kernels().lines();
  state.state["config"] = config::dump_yaml(config_);
  state.state["sources"] = setup_.sources;
  state.parts = this->state(/*with_copies=*/false);
  if (!setup_.placed.sharding) {
    for (ckpt::TensorPart& part : state.parts)
      state.tensors.emplace_back(std::move(part.name), std::move(part.tensor));
    state.parts.clear();
  }
  checkpoints_->save(step, std::move(state), last_eval_);
  last_saved_ = step;
  last_checkpoint_ = checkpoints_->directory() / ckpt::step_name(step);
  observer_.on_checkpoint(step, checkpoints_->directory());
}

void Trainer::restore_kept(const ckpt::TrainingCheckpoint& checkpoint) {
  for (nn::Parameter* parameter : setup_.placed.model->parameters()) {
    const std::string name = kWeights + parameter->name();
    // A new head that an older version did not save is made again: the seed is the same.
    if (parameter->trainable() || !checkpoint.has(name)) continue;
    keep(*parameter);
    for (nn::Box& box : parameter->boxes(parameter->owned()))
      checkpoint.copy_part(
          {name, std::move(box.tensor), std::move(box.global.offset), parameter->global_shape()});
  }
}

ckpt::ReadWhole Trainer::whole_tensors() const {
  if (!setup_.placed.sharding) return ckpt::read_from_memory;
  if (last_checkpoint_.empty())
    throw_error<InternalError>("{}: no checkpoint to export", config_.train.output_dir);
  const auto checkpoint = std::make_shared<const ckpt::TrainingCheckpoint>(
      ckpt::TrainingCheckpoint::open(last_checkpoint_, ckpt::TrainingCheckpoint::Verify::kSizes));
  return [this, checkpoint](const nn::Parameter& parameter) {
    const std::string name = kWeights + parameter.name();
    return checkpoint->has(name) ? checkpoint->whole(name)
                                 : ckpt::read_from_directory(*setup_.placed.source, parameter);
  };
}

}  // namespace heddle::train
