// Keys that a run is given and makes no use of.
#include <string>
#include <string_view>
#include <vector>

#include "base/errors.h"
#include "config/config.h"
#include "config/field.h"
#include "config/objective.h"
#include "config/unused_policy_keys.h"

namespace heddle::config {

using models::Head;

namespace {

/// A schedule of the run, the critic's among them.
bool has_schedule(const RunConfig& config, Schedule schedule) {
  const bool has_critic = objective_of(config) == Objective::kPolicy && config.rl.has_critic();
  return config.optim.schedule == schedule || (has_critic && config.rl.critic.schedule == schedule);
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
    note("train.freeze", "train.method is lora, by which adapters alone are trained");
  }
  if (config.model.dtype != Dtype::kBFloat16)
    note("optim.grad_dtype", "gradients of such weights have the dtype of the weights");
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
  if (!has_schedule(config, Schedule::kWsd)) {
    note("optim.decay_steps", "optim.schedule is not wsd");
    note("optim.decay_type", "optim.schedule is not wsd");
  }
  const bool decays = has_schedule(config, Schedule::kLinear) ||
                      has_schedule(config, Schedule::kCosine) ||
                      has_schedule(config, Schedule::kWsd);
  if (!decays) {
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
