#include "train/resume.h"

#include <filesystem>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/text.h"
#include "config/config.h"
#include "config/objective.h"

namespace heddle::train {
namespace {

/// How a run of `now` begins with what a run of `before` has learned.
std::string how_to_start(const config::RunConfig& before, const config::RunConfig& now) {
  std::string given = "give DIR as model.path";
  if (before.train.method == config::Method::kLora) {
    given = now.train.method == config::Method::kLora
                ? "give DIR as adapter.path"
                : fmt::format(
                      "merge that adapter with `heddle export {} --adapter DIR --output "
                      "MERGED`, give MERGED as model.path",
                      before.model.path);
  }
  return fmt::format(
      "start from what it has learned: `heddle export CHECKPOINT --output DIR`, {} and another "
      "train.output_dir",
      given);
}

}  // namespace

void check_resume(const config::RunConfig& config) {
  const std::filesystem::path path = config.train.resume;
  if (path == "auto" || path == "never" || std::filesystem::exists(path / "manifest.json")) return;
  const std::string key = config::where(config, "train.resume");
  if (!std::filesystem::is_directory(path)) {
    throw_error<ConfigError>(
        "{}: there is no folder {}; expected auto, never, or a checkpoint such as "
        "{}/checkpoints/step-00000100",
        key, path.string(), config.train.output_dir);
  }
  std::vector<ckpt::CheckpointInfo> found = ckpt::list_checkpoints(path / "checkpoints");
  if (found.empty()) found = ckpt::list_checkpoints(path);
  throw_error<ConfigError>(
      "{}: {} is no checkpoint, manifest.json is missing{}", key, path.string(),
      found.empty() ? "" : "; the newest in it is " + found.back().path.string());
}

void check_same_method(const config::RunConfig& before, const config::RunConfig& now,
                       std::int64_t step) {
  if (before.train.method == now.train.method) return;
  const std::string_view method = config::to_string(before.train.method);
  throw_error<ConfigError>(
      "the checkpoint of step {} was written with train.method={}, and this run has {}: it holds "
      "other weights; set train.method={} to continue it, or {}",
      step, method, config::to_string(now.train.method), method, how_to_start(before, now));
}

void check_same_dtype(const config::RunConfig& before, const config::RunConfig& now,
                      std::int64_t step) {
  if (before.model.dtype == now.model.dtype) return;
  const std::string_view dtype = config::to_string(before.model.dtype);
  throw_error<ConfigError>(
      "the checkpoint of step {} was written with model.dtype={}, and this run has {}: its weights "
      "and optimizer state do not fit; set model.dtype={} to continue it",
      step, dtype, config::to_string(now.model.dtype), dtype);
}

void check_same_optimizer(const config::RunConfig& before, const config::RunConfig& now,
                          std::int64_t step) {
  const auto refuse = [step](const char* key, std::string_view was, std::string_view is) {
    throw_error<ConfigError>(
        "the checkpoint of step {} was written with {}={}, and this run has {}: the optimizer "
        "keeps other tensors; set {}={} to continue it, or start from what it has learned: `heddle "
        "export CHECKPOINT --output DIR` and another train.output_dir",
        step, key, was, is, key, was);
  };
  const config::OptimSection &was = before.optim, &is = now.optim;
  if (was.name != is.name)
    refuse("optim.name", config::to_string(was.name), config::to_string(is.name));
  if (was.state_dtype != is.state_dtype && is.name != config::OptimName::kSgd) {
    refuse("optim.state_dtype", config::to_string(was.state_dtype),
           config::to_string(is.state_dtype));
  }
  if (is.name == config::OptimName::kSgd && (was.momentum == 0) != (is.momentum == 0))
    refuse("optim.momentum", fmt::format("{}", was.momentum), fmt::format("{}", is.momentum));
}

void check_same_objective(const config::RunConfig& before, const config::RunConfig& now,
                          std::int64_t step) {
  const config::Objective was = config::objective_of(before), is = config::objective_of(now);
  if (was != is) {
    throw_error<ConfigError>(
        "the checkpoint of step {} was written with train.objective={}, and this run has {}; set "
        "train.objective={} to continue it, or {}",
        step, config::to_string(was), config::to_string(is), config::to_string(was),
        how_to_start(before, now));
  }
  if (is != config::Objective::kPolicy) return;
  const auto require = [step](bool had, bool has, const char* what, const std::string& setting) {
    if (had || !has) return;
    throw_error<ConfigError>(
        "the checkpoint of step {} has no {}, which this run goes on with; set {} to continue it, "
        "or another train.output_dir",
        step, what, setting);
  };
  require(
      before.rl.has_critic(), now.rl.has_critic(), "critic",
      fmt::format("rl.algorithm.advantage={}", config::to_string(before.rl.algorithm.advantage)));
  require(before.rl.reference.follows(), now.rl.reference.follows(),
          "reference that follows the policy", "rl.reference.sync_every=0");
}

void require_all_weights(const ckpt::TrainingCheckpoint& checkpoint,
                         const std::set<std::string>& of_run) {
  std::vector<std::string> missing;
  for (const std::string& name : of_run)
    if (!checkpoint.has(name)) missing.push_back(name);
  if (missing.empty()) return;
  throw_error<ConfigError>(
      "the checkpoint of step {} has no values of {} tensor{} that this run trains and its own did "
      "not: {}; set train.freeze, adapter.targets, adapter.target_parameters and "
      "adapter.modules_to_save as they were to continue it, or another train.output_dir",
      checkpoint.info().step, missing.size(), missing.size() == 1 ? "" : "s",
      text::list_some(missing));
}

void require_no_other_weights(const ckpt::TrainingCheckpoint& checkpoint,
                              const std::set<std::string>& of_run, const std::string& folder) {
  std::string first;
  std::int64_t count = 0;
  for (const std::string& name : checkpoint.names()) {
    if (!name.starts_with(folder) || of_run.contains(name.substr(folder.size()))) continue;
    if (count++ == 0) first = name.substr(folder.size());
  }
  if (count == 0) return;
  throw_error<ConfigError>(
      "the checkpoint of step {} holds what {} tensor{} learned that this run does not have, the "
      "first is '{}'; set adapter.targets, adapter.target_parameters and the model as they were to "
      "continue it, or another train.output_dir",
      checkpoint.info().step, count, count == 1 ? "" : "s", first);
}

}  // namespace heddle::train
