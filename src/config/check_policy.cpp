#include "config/check_policy.h"

#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/secret.h"
#include "config/check.h"

namespace heddle::config {
namespace {

/// Completions of a batch at most: all are in memory until its last step.
constexpr double kMostCompletions = 1 << 24;

class PolicyChecker {
 public:
  PolicyChecker(const RunConfig& config, const std::string& source) : c_(config), source_(source) {}

  void rows() const {
    const RlSection& rl = c_.rl;
    if (c_.rollout.max_new_tokens >= c_.data.max_length) {
      fail("rollout.max_new_tokens",
           fmt::format("{} leaves no room for a prompt in data.max_length {}",
                       c_.rollout.max_new_tokens, c_.data.max_length));
    }
    if (rl.history == History::kRender && (c_.data.truncation == data::Truncation::kKeepStart ||
                                           c_.data.truncation == data::Truncation::kKeepEnd)) {
      fail("data.truncation",
           "rl.history render renders whole conversations: expected auto (a longer prompt is an "
           "error) or drop");
    }
    for (const std::string& stop : c_.rollout.stop) {
      if (stop.empty())
        fail("rollout.stop", "an empty text ends nothing: expected at least a byte");
    }
    // In double: an integer may not hold it.
    const double completions = static_cast<double>(rl.groups_per_step) *
                               static_cast<double>(rl.sync_every) *
                               static_cast<double>(rl.samples_per_group);
    if (completions > kMostCompletions) {
      fail(largest_factor(),
           fmt::format("rl.groups_per_step {} x rl.sync_every {} x rl.samples_per_group {} are "
                       "{:.3g} completions of a batch, which are in memory until its last step: "
                       "expected at most {:.0f}",
                       rl.groups_per_step, rl.sync_every, rl.samples_per_group, completions,
                       kMostCompletions));
    }
    const int sources = !rl.reward.verifiers.empty() + !rl.reward.command.empty() +
                        !rl.reward.url.empty() + !rl.reward.environment.empty();
    if (sources != 1) {
      fail("rl.reward",
           fmt::format("expected 1 of verifiers, command, url and environment, not {}", sources));
    }
    const std::string& url = rl.reward.url;
    if (!url.empty() && !url.starts_with("http://") && !url.starts_with("https://"))
      fail("rl.reward.url",
           fmt::format("expected http:// or https://, found '{}'", text::without_password(url)));
  }

  void advantages() const {
    const RlSection& rl = c_.rl;
    if (rl.samples_per_group == 1 &&
        rl.algorithm.advantage != objective::Advantage::kReinforcePlusPlus && !rl.has_critic()) {
      fail("rl.samples_per_group",
           fmt::format("1 gives a completion nothing to be compared with by rl.algorithm.advantage "
                       "{}: expected 2 or more",
                       to_string(rl.algorithm.advantage)));
    }
    if (rl.samples_per_group == 1 && rl.dynamic_sampling) {
      fail("rl.dynamic_sampling",
           "replaces groups whose rewards are all equal, and with rl.samples_per_group 1 all are: "
           "expected false, or 2 or more samples");
    }
    if (rl.overlong == Overlong::kPunish &&
        (rl.overlong_buffer == 0 || rl.overlong_buffer > c_.rollout.max_new_tokens)) {
      fail("rl.overlong_buffer",
           fmt::format("expected 1 to rollout.max_new_tokens {} with rl.overlong punish, found {}",
                       c_.rollout.max_new_tokens, rl.overlong_buffer));
    }
  }

  void anchors() const {
    const RlSection& rl = c_.rl;
    if (rl.replays_experts() && !c_.train.router_replay.empty()) {
      fail("train.router_replay",
           "takes experts from files, and rl.router_replay those of generation or of the anchor's "
           "pass: expected rl.router_replay off, or no folder");
    }
    if (rl.router_replay == RouterReplay::kR2 && rl.old_logprobs != OldLogprobs::kRecompute) {
      fail("rl.router_replay",
           fmt::format("r2 takes the experts of the pass that finds the anchor: expected "
                       "rl.old_logprobs recompute, found {}",
                       to_string(rl.old_logprobs)));
    }
    if (rl.correction.rs_bounds[0] > rl.correction.rs_bounds[1])
      fail("rl.correction.rs_bounds", "the first bound is the lower one");
    for (const auto& [key, is_on] :
         {std::pair("rl.correction.is_batch_normalize", rl.correction.normalizes()),
          std::pair("rl.correction.rs_denominator", rl.correction.drops())}) {
      if (is_on && rl.old_logprobs != OldLogprobs::kRecompute) {
        fail(key, fmt::format("needs the ratios of the whole batch before its first step: expected "
                              "rl.old_logprobs recompute, found {}",
                              to_string(rl.old_logprobs)));
      }
    }
  }

  void updates() const {
    const RlSection& rl = c_.rl;
    if (rl.update_mode == UpdateMode::kPin) {
      if (c_.train.method != Method::kLora)
        fail("rl.update_mode", "pin keeps versions of adapters: expected train.method lora");
      if (!c_.adapter.modules_to_save.empty())
        fail("rl.update_mode", "pin keeps adapters alone: adapter.modules_to_save must be empty");
    }
    if (!rl.is_disaggregated() && c_.parallel.cp > 1) {
      fail("parallel.cp",
           "ranks that train and generate have whole sequences: expected 1, or rl.rollout_ranks "
           "that generate");
    }
    // The trainers answer the evaluation's prompts themselves.
    if (c_.parallel.cp > 1 && !c_.data.eval.empty()) {
      fail("data.eval", "answers are generated in any layout but parallel.cp above 1");
    }
    if (c_.rollout.merge_adapter) {
      if (c_.train.method != Method::kLora)
        fail("rollout.merge_adapter",
             "adds an adapter to its matrices: expected train.method lora");
      if (rl.update_mode == UpdateMode::kPin)
        fail(
            "rollout.merge_adapter",
            "has one version in the matrices, and rl.update_mode pin several beside them: expected "
            "another mode, or false");
    }
    if (c_.train.method == Method::kLora && c_.adapter.dropout > 0) {
      fail("adapter.dropout",
           "train.objective policy compares a pass that trains with the generation of the same "
           "tokens, which noise would tell apart; set it to 0");
    }
    const bool keeps = rl.update_mode == UpdateMode::kKeep || rl.update_mode == UpdateMode::kPin;
    if (c_.rollout.release_memory && rl.staleness() > 0 && keeps)
      fail("rollout.release_memory",
           fmt::format("takes the caches that rl.update_mode {} lets running sequences go on from: "
                       "expected false, or recompute, wait or abort",
                       to_string(rl.update_mode)));
  }

  void generation() const {
    const RlSection& rl = c_.rl;
    if ((c_.rollout.top_p < 1 || c_.rollout.min_p > 0) && c_.rollout.top_k == 0) {
      fail(
          "rollout.top_k",
          "0 sets no bound to the tokens that rollout.top_p or rollout.min_p leave, which training "
          "has to know: expected 1 or more");
    }
    if (rl.history == History::kRender && !rl.reward.verifiers.empty()) {
      fail(
          "rl.history",
          "render takes answers to turns as messages, and verifiers give none: expected append, or "
          "rl.reward.command, url or environment");
    }
    if (rl.old_logprobs == OldLogprobs::kLogLinear && rl.mode == RlMode::kSync) {
      fail("rl.old_logprobs",
           "loglinear goes by how many versions old a token is, and in rl.mode sync none is: "
           "expected rollout or recompute, or rl.mode async");
    }
    if (rl.trainer_ranks > 0 && !rl.is_disaggregated())
      fail("rl.trainer_ranks", "needs rl.rollout_ranks, the ranks that generate");
    if (rl.is_disaggregated() && rl.rollout_ranks % c_.rollout.tp != 0) {
      fail("rollout.tp",
           fmt::format("{} does not divide rl.rollout_ranks {}", c_.rollout.tp, rl.rollout_ranks));
    }
  }

  void deterministic() const {
    const RlSection& rl = c_.rl;
    if (!rl.deterministic) return;
    if (c_.device.name.type != DeviceType::kCpu && !c_.train.deterministic) {
      fail("rl.deterministic",
           fmt::format("on device {} steps add numbers in any order: expected train.deterministic "
                       "true, found false",
                       to_string(c_.device.name)));
    }
    if (rl.staleness() == 0) return;
    if (rl.stale_policy == rl::StalePolicy::kDrop) {
      fail("rl.stale_policy",
           "drop leaves out whichever groups are late, and rl.deterministic takes all in their "
           "order: expected wait");
    }
    if (rl.is_disaggregated() && rl.update_mode != UpdateMode::kWait) {
      fail("rl.update_mode",
           fmt::format("{} lets new weights come in the middle of completions, at a token that the "
                       "clock decides: expected wait with rl.deterministic and rl.rollout_ranks",
                       to_string(rl.update_mode)));
    }
  }

  void entropy_bonus() const {
    const RlAlgorithm& a = c_.rl.algorithm;
    if (a.entropy_target == 0) return;
    if (a.entropy_coef_min > a.entropy_coef_max)
      fail("rl.algorithm.entropy_coef_min",
           fmt::format("{} is above entropy_coef_max {}", a.entropy_coef_min, a.entropy_coef_max));
    if (a.entropy_coef < a.entropy_coef_min || a.entropy_coef > a.entropy_coef_max) {
      fail("rl.algorithm.entropy_coef",
           fmt::format("expected {} to {} (entropy_coef_min, entropy_coef_max) with "
                       "rl.algorithm.entropy_target, found {}",
                       a.entropy_coef_min, a.entropy_coef_max, a.entropy_coef));
    }
  }

  void critic() const {
    const RlCritic& critic = c_.rl.critic;
    if (!c_.rl.has_critic()) return;
    if (critic.schedule == Schedule::kWsd && c_.optim.decay_steps == 0)
      fail("rl.critic.schedule", "wsd needs optim.decay_steps >= 1");
    if (c_.train.max_steps > 0 && critic.warmup_steps >= c_.train.max_steps) {
      fail("rl.critic.warmup_steps", fmt::format("{} leaves the policy none of train.max_steps {}",
                                                 critic.warmup_steps, c_.train.max_steps));
    }
  }

 private:
  /// Key that makes a batch large.
  const char* largest_factor() const {
    const RlSection& rl = c_.rl;
    if (rl.groups_per_step >= std::max(rl.sync_every, rl.samples_per_group))
      return "rl.groups_per_step";
    return rl.sync_every >= rl.samples_per_group ? "rl.sync_every" : "rl.samples_per_group";
  }

  [[noreturn]] void fail(const std::string& key, const std::string& message) const {
    refuse(c_, source_, key, message);
  }

  const RunConfig& c_;
  const std::string& source_;
};

}  // namespace

void check_policy(const RunConfig& config, const std::string& source) {
  const PolicyChecker checker(config, source);
  checker.rows();
  checker.advantages();
  checker.critic();
  checker.anchors();
  checker.entropy_bonus();
  checker.updates();
  checker.generation();
  checker.deterministic();
}

}  // namespace heddle::config
