#include "config/unused_policy_keys.h"

#include <initializer_list>

#include "config/field.h"
#include "config/objective.h"

namespace heddle::config {
namespace {

using objective::Advantage;
using objective::PolicyLoss;

class PolicyKeys {
 public:
  PolicyKeys(const RunConfig& config, const NoteUnused& note)
      : c_(config), rl_(config.rl), note_(note) {}

  void rows() const {
    note_("train.global_batch_size", "rl.groups_per_step decides");
    note_("data.format", "rows have a prompt or messages (data.fields)");
    note_("data.loss_on", "what the policy draws is trained");
    note_("data.cache_dir", "prompts are read anew");
    note_("data.packing", "completions share micro-batches as they fit");
    for (const char* field :
         {"completion", "text", "conversations", "from", "value", "instruction", "input", "output",
          "system", "history", "input_ids", "labels", "label", "weight", "query", "positive",
          "negatives", "chosen", "rejected"})
      note_(std::string("data.fields.") + field, "rows have a prompt or messages");
  }

  void mode() const {
    if (rl_.mode == RlMode::kSync) {
      all("rl.",
          {"max_staleness", "stale_policy", "stale_attempts", "update_mode", "max_inflight_groups"},
          "rl.mode is sync");
    } else if (rl_.stale_policy == rl::StalePolicy::kWait) {
      note_("rl.stale_attempts", "rl.stale_policy is wait, by which no group gets too old");
    }
    if (!rl_.is_disaggregated()) {
      note_("rollout.tp", "rl.rollout_ranks is 0");
      section("sync", "rl.rollout_ranks is 0");
      if (c_.parallel.fsdp == Degree{1}) note_("rollout.gather_weights", "parallel.fsdp is 1");
    } else {
      note_("rollout.release_memory", "rl.rollout_ranks do not train");
      note_("rollout.gather_weights", "rl.rollout_ranks have no parallel.fsdp");
      if (!rl_.has_two_jobs()) all("sync.", {"listen", "rendezvous"}, "rl.role is all");
    }
    if (c_.device.name.type == DeviceType::kCpu)
      note_("rollout.graph_batches", "the device is the host, which records no steps");
  }

  void advantages() const {
    const Advantage advantage = rl_.algorithm.advantage;
    if (!rl_.has_critic()) {
      note_("rl.algorithm.lambda", "rl.algorithm.advantage is not gae");
      section("rl.critic", "rl.algorithm.advantage is not gae");
      if (advantage != Advantage::kReinforcePlusPlus)
        note_("rl.algorithm.gamma", "rl.algorithm.advantage is neither reinforce++ nor gae");
    } else if (rl_.critic.updates == 1) {
      note_("rl.critic.clip", "rl.critic.updates is 1, and values change after it");
    }
    if (rl_.overlong != Overlong::kPunish)
      all("rl.", {"overlong_buffer", "overlong_penalty"}, "rl.overlong is not punish");
    if (!rl_.dynamic_sampling) note_("rl.max_attempts", "rl.dynamic_sampling is false");
  }

  void loss() const {
    const PolicyLoss loss = rl_.algorithm.loss;
    const bool clips_both = loss == PolicyLoss::kPpo || loss == PolicyLoss::kGspo;
    if (!clips_both) note_("rl.algorithm.dual_clip", "rl.algorithm.loss is neither ppo nor gspo");
    if (!clips_both && loss != PolicyLoss::kCispo) {
      all("rl.algorithm.", {"clip_low", "clip_high"},
          "rl.algorithm.loss is none of ppo, gspo and cispo; what it clips is counted alone");
    }
    if (loss != PolicyLoss::kSapo) {
      all("rl.algorithm.", {"sapo_tau_positive", "sapo_tau_negative"},
          "rl.algorithm.loss is not sapo");
    }
    if (loss != PolicyLoss::kDppo)
      all("rl.algorithm.", {"dppo_cap", "dppo_delta"}, "rl.algorithm.loss is not dppo");
    if (loss != PolicyLoss::kDro) note_("rl.algorithm.dro_beta", "rl.algorithm.loss is not dro");
    if (rl_.algorithm.entropy_target == 0) {
      all("rl.algorithm.", {"entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"},
          "rl.algorithm.entropy_target is 0");
    }
  }

  void reference() const {
    if (rl_.reference.kl_coef == 0) {
      all("rl.reference.", {"kl_where", "kl_form", "kl_ratio_weighted", "sync_every"},
          "rl.reference.kl_coef is 0");
    } else if (rl_.reference.kl_where == KlWhere::kReward) {
      all("rl.reference.", {"kl_form", "kl_ratio_weighted"},
          "rl.reference.kl_where is reward, which k1 is taken from");
    }
  }

  void correction() const {
    const RlCorrection& correction = rl_.correction;
    if (rl_.old_logprobs == OldLogprobs::kRollout && rl_.algorithm.loss != PolicyLoss::kReinforce) {
      all("rl.correction.", {"is", "is_cap"},
          "rl.old_logprobs is rollout, by which the ratio holds the weights; mismatch_* alone tell "
          "of it. recompute or loglinear weighs tokens");
    } else if (correction.is == objective::ImportanceWeight::kOff) {
      all("rl.correction.", {"is_cap", "is_batch_normalize"}, "rl.correction.is is off");
    }
    if (correction.rs == objective::Rejection::kOff)
      all("rl.correction.", {"rs_bounds", "rs_denominator"}, "rl.correction.rs is off");
  }

  void reward() const {
    const RlReward& reward = rl_.reward;
    if (reward.verifiers.empty()) {
      note_("rl.reward.combine", "rl.reward.verifiers is empty");
    } else {
      note_("rl.reward.timeout_s", "verifiers answer at once");
    }
    if (reward.command.empty() && reward.environment.empty()) {
      all("rl.reward.", {"workers", "memory_bytes", "cpu_seconds"},
          "neither rl.reward.command nor environment is given");
    }
    if (reward.url.empty()) {
      all("rl.reward.", {"token", "batch", "concurrency", "retries", "backoff_s"},
          "rl.reward.url is empty");
    }
  }

 private:
  void all(const char* section, std::initializer_list<const char*> keys,
           std::string_view reason) const {
    for (const char* key : keys) note_(std::string(section) + key, reason);
  }
  void section(std::string_view name, std::string_view reason) const {
    for (const Field& field : find_section(name)->fields) note_(field.key, reason);
  }

  const RunConfig& c_;
  const RlSection& rl_;
  const NoteUnused& note_;
};

}  // namespace

void note_policy_keys(const RunConfig& config, const NoteUnused& note) {
  if (objective_of(config) != Objective::kPolicy) {
    for (const Section& section : schema()) {
      const bool is_of_rl = section.key == "rl" || section.key.starts_with("rl.") ||
                            section.key == "rollout" || section.key == "sync";
      if (!is_of_rl) continue;
      for (const Field& field : section.fields) note(field.key, "train.objective is not policy");
    }
    return;
  }
  const PolicyKeys keys(config, note);
  keys.rows();
  keys.mode();
  keys.advantages();
  keys.loss();
  keys.reference();
  keys.correction();
  keys.reward();
}

}  // namespace heddle::config
