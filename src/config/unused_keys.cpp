// Keys that a run is given and makes no use of.
#include <string>
#include <string_view>
#include <vector>

#include "base/errors.h"
#include "config/config.h"
#include "config/field.h"
#include "config/objective.h"

namespace heddle::config {

using models::Head;

namespace {

/// Keys of `heddle rl` in other runs, and those that it does without.
template <class Note>
void note_policy_keys(const RunConfig& config, Note&& note) {
  if (objective_of(config) != Objective::kPolicy) {
    for (const Section& section : schema()) {
      const bool is_of_rl = section.key == "rl" || section.key.starts_with("rl.") ||
                            section.key == "rollout" || section.key == "sync";
      if (!is_of_rl) continue;
      for (const Field& field : section.fields) note(field.key, "train.objective is not policy");
    }
    return;
  }
  note("train.global_batch_size", "rl.groups_per_step decides");
  note("data.format", "rows have a prompt or messages (data.fields)");
  note("data.loss_on", "what the policy draws is trained");
  note("data.cache_dir", "prompts are read anew");
  if (config.rl.mode == RlMode::kSync) {
    for (const char* key : {"rl.max_staleness", "rl.stale_policy", "rl.stale_attempts",
                            "rl.update_mode", "rl.max_inflight_groups"})
      note(key, "rl.mode is sync");
  }
  if (!config.rl.is_disaggregated()) {
    note("rollout.tp", "rl.rollout_ranks is 0");
    for (const Field& field : find_section("sync")->fields)
      note(field.key, "rl.rollout_ranks is 0");
  } else {
    note("rollout.release_memory", "rl.rollout_ranks do not train");
    if (!config.rl.has_two_jobs()) {
      for (const char* key : {"sync.listen", "sync.rendezvous"}) note(key, "rl.role is all");
    }
  }
  if (!config.rl.has_critic()) {
    note("rl.algorithm.lambda", "rl.algorithm.advantage is not gae");
    for (const Field& field : find_section("rl.critic")->fields)
      note(field.key, "rl.algorithm.advantage is not gae");
  } else if (config.rl.critic.updates == 1) {
    note("rl.critic.clip", "rl.critic.updates is 1, and values change after it");
  }
  if (config.rl.algorithm.entropy_target == 0) {
    for (const char* key : {"entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"})
      note(std::string("rl.algorithm.") + key, "rl.algorithm.entropy_target is 0");
  }
  if (config.rl.reference.kl_coef == 0)
    note("rl.reference.sync_every", "rl.reference.kl_coef is 0");
  const RlCorrection& correction = config.rl.correction;
  if (correction.is == objective::ImportanceWeight::kOff) {
    note("rl.correction.is_cap", "rl.correction.is is off");
    note("rl.correction.is_batch_normalize", "rl.correction.is is off");
  }
  if (correction.rs == objective::Rejection::kOff) {
    note("rl.correction.rs_bounds", "rl.correction.rs is off");
    note("rl.correction.rs_denominator", "rl.correction.rs is off");
  }
  if (!config.rl.dynamic_sampling) note("rl.max_attempts", "rl.dynamic_sampling is false");
}

}  // namespace

std::vector<std::string> unused_keys(const RunConfig& config) {
  std::vector<std::string> found;
  const auto note = [&](const std::string& key, std::string_view reason) {
    const Field* field = find_field(key);
    // A file that spells out every default (config.resolved.yaml) asks for nothing.
    if (config.is_set(key) && field->get(config) != field->get(RunConfig())) {
      found.push_back(fmt::format("{} has no effect: {}", where(config, key), reason));
    }
  };
  if (config.train.method != Method::kLora) {
    for (const Field& field : find_section("adapter")->fields)
      note(field.key, "train.method is full");
  } else if (config.adapter.modules_to_save.empty() && config.model.head != Head::kClassify) {
    note("train.freeze", "train.method is lora, and adapter.targets names what learns");
  }
  if (config.optim.name == OptimName::kAdamW) note("optim.momentum", "optim.name is adamw");
  if (config.optim.name == OptimName::kSgd) {
    note("optim.betas", "optim.name is sgd");
    note("optim.eps", "optim.name is sgd");
    note("optim.state_dtype", "optim.name is sgd");
    note("optim.offload", "optim.name is sgd");
  }
  if (config.train.spike == Spike::kOff) {
    note("train.spike_factor", "train.spike is off");
    note("train.spike_window", "train.spike is off");
  }
  if (config.eval.input.empty()) {
    for (const char* key : {"eval.answer", "eval.max_rows", "eval.max_new_tokens"})
      note(key, "eval.input is empty");
  }
  if (config.device.name.type == DeviceType::kCpu) {
    note("optim.offload", "the device is the host");
    note("train.offload_activations", "the device is the host");
  }
  if (config.optim.schedule != Schedule::kWsd) {
    note("optim.decay_steps", "optim.schedule is not wsd");
    note("optim.decay_type", "optim.schedule is not wsd");
  }
  if (config.optim.schedule == Schedule::kConstant) {
    note("optim.min_lr_ratio", "optim.schedule is constant");
  }
  if (config.model.head != Head::kClassify) {
    note("model.num_labels", "model.head is not classify");
    note("data.labels", "model.head is not classify");
  }
  if (objective_of(config) != Objective::kDpo) {
    for (const Field& field : find_section("dpo")->fields)
      note(field.key, "train.objective is not dpo");
  } else {
    const objective::DpoLoss loss = config.dpo.loss;
    if (loss != objective::DpoLoss::kSigmoid && loss != objective::DpoLoss::kSimpo)
      note("dpo.label_smoothing", "dpo.loss is neither sigmoid nor simpo");
    if (loss != objective::DpoLoss::kSimpo) note("dpo.simpo_gamma", "dpo.loss is not simpo");
  }
  if (objective_of(config) == Objective::kClassification ||
      objective_of(config) == Objective::kContrastive)
    note("data.loss_on", "the objective has no loss of tokens");
  note_policy_keys(config, note);
  if (config.model.head != Head::kEmbed) {
    note("model.normalize", "model.head is not embed");
    note("train.infonce_temperature", "model.head is not embed");
  }
  if (config.train.recompute) note("train.memory_limit_gib", "train.recompute is not auto");
  if (config.train.max_steps > 0) note("train.epochs", "train.max_steps decides");
  if (config.parallel.cp == 1) note("parallel.cp_method", "parallel.cp is 1");
  if (config.parallel.pp == 1) note("parallel.pp_schedule", "parallel.pp is 1");
  if (config.parallel.pp_schedule != PpSchedule::kInterleaved)
    note("parallel.pp_chunks", "parallel.pp_schedule is not interleaved");
  if (config.log.sample_prompts.empty()) note("log.sample_tokens", "log.sample_prompts is empty");
  return found;
}

}  // namespace heddle::config
