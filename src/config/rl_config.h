#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/named_enum.h"
#include "config/schedule.h"
#include "objective/advantage.h"
#include "objective/policy_options.h"
#include "reward/combine.h"
#include "rl/stale_policy.h"
#include "rollout/cache_options.h"

/// Sections of `heddle rl`; see run_config.h.
namespace heddle::config {

enum class RlMode { kSync, kAsync };
constexpr auto names_of(RlMode) { return spelled("sync", "async"); }

/// Work of a job's ranks: the whole run, or the part of it that another job does not do.
enum class RlRole { kAll, kTrainer, kRollout };
constexpr auto names_of(RlRole) { return spelled("all", "trainer", "rollout"); }

/// Fate of running sequences when the weights change.
enum class UpdateMode { kRecompute, kWait, kAbort, kKeep, kPin };
constexpr auto names_of(UpdateMode) { return spelled("recompute", "wait", "abort", "keep", "pin"); }

/// Text that a later turn follows: what stood there before, or the conversation as the chat
/// template renders it then.
enum class History { kAppend, kRender };
constexpr auto names_of(History) { return spelled("append", "render"); }

enum class OldLogprobs { kRollout, kRecompute, kLogLinear };
constexpr auto names_of(OldLogprobs) { return spelled("rollout", "recompute", "loglinear"); }

/// Experts that the trainer takes for a completion's tokens: those of its own router, those that it
/// chose in the pass of the anchor (R2), or those that generation chose (R3). Auto: the last for
/// models with experts in mode async.
enum class RouterReplay { kAuto, kOff, kR2, kR3 };
constexpr auto names_of(RouterReplay) { return spelled("auto", "off", "r2", "r3"); }

enum class Overlong { kOff, kPunish, kMask };
constexpr auto names_of(Overlong) { return spelled("off", "punish", "mask"); }

/// Whether what rl.correction.rs rejects counts in the divisor of the loss.
enum class RejectedTokens { kKeep, kDrop };
constexpr auto names_of(RejectedTokens) { return spelled("keep", "drop"); }

enum class KlWhere { kLoss, kReward };
constexpr auto names_of(KlWhere) { return spelled("loss", "reward"); }

struct RlAlgorithm {
  objective::Advantage advantage = objective::Advantage::kGrpo;
  objective::PolicyLoss loss = objective::PolicyLoss::kPpo;
  objective::LossMean mean = objective::LossMean::kToken;
  double clip_low = 0.2, clip_high = 0.2;
  double dual_clip = 0;
  double sapo_tau_positive = 1, sapo_tau_negative = 1.05;
  double dppo_cap = 20, dppo_delta = 0.2;
  double dro_beta = 0.05;
  double entropy_coef = 0;
  double entropy_target = 0, entropy_coef_delta = 0.005;
  double entropy_coef_min = 0, entropy_coef_max = 1;
  double gamma = 1, lambda = 1;
};

struct RlCorrection {
  objective::ImportanceWeight is = objective::ImportanceWeight::kToken;
  double is_cap = 2;
  bool is_batch_normalize = false;
  objective::Rejection rs = objective::Rejection::kOff;
  std::array<double, 2> rs_bounds = {0, 3};
  RejectedTokens rs_denominator = RejectedTokens::kKeep;
  double off_policy_delta = 0;

  bool normalizes() const { return is != objective::ImportanceWeight::kOff && is_batch_normalize; }
  bool drops() const {
    return rs != objective::Rejection::kOff && rs_denominator == RejectedTokens::kDrop;
  }
};

struct RlReference {
  double kl_coef = 0;
  KlWhere kl_where = KlWhere::kLoss;
  objective::KlForm kl_form = objective::KlForm::kK3;
  bool kl_ratio_weighted = false;
  std::int64_t sync_every = 0;

  /// Has weights of its own that change.
  bool follows() const { return kl_coef > 0 && sync_every > 0; }
};

/// Optimizer of the critic, and the loss of its values; for the rest optim.* are its too.
struct RlCritic {
  double lr = 1e-5;
  Schedule schedule = Schedule::kConstant;
  std::int64_t lr_warmup_steps = 0;
  double clip_norm = 1;
  std::int64_t updates = 1;
  double clip = 0.5;
  std::int64_t warmup_steps = 0;
};

struct RlReward {
  std::map<std::string, double> verifiers;        ///< Name -> weight.
  std::map<std::string, std::string> parameters;  ///< Verifier -> JSON object.
  reward::Combine combine = reward::Combine::kSum;
  std::vector<std::string> command, environment;
  std::int64_t workers = 2;
  std::string url, token;
  double timeout_s = 30;
  std::optional<double> failed;
  std::int64_t memory_bytes = 0, cpu_seconds = 0;
  std::int64_t batch = 32, concurrency = 8, retries = 4;
  double backoff_s = 0.5;
  bool shuffle = false;
};

struct RlSection {
  RlMode mode = RlMode::kSync;
  RlRole role = RlRole::kAll;
  std::int64_t trainer_ranks = 0, rollout_ranks = 0;
  std::int64_t max_staleness = 1;
  rl::StalePolicy stale_policy = rl::StalePolicy::kWait;
  std::int64_t stale_attempts = 4;
  UpdateMode update_mode = UpdateMode::kRecompute;
  History history = History::kAppend;
  std::int64_t groups_per_step = 32, samples_per_group = 8;
  std::int64_t sync_every = 1, epochs = 1;
  std::int64_t max_inflight_groups = 0;
  OldLogprobs old_logprobs = OldLogprobs::kRollout;
  RouterReplay router_replay = RouterReplay::kAuto;
  Overlong overlong = Overlong::kOff;
  std::int64_t overlong_buffer = 0;
  double overlong_penalty = 1;
  bool dynamic_sampling = false;
  std::int64_t max_attempts = 4;
  std::int64_t groups_every = 10;
  bool deterministic = false;
  RlAlgorithm algorithm;
  RlCorrection correction;
  RlReference reference;
  RlCritic critic;
  RlReward reward;

  bool has_critic() const { return algorithm.advantage == objective::Advantage::kGae; }
  /// Trainers and rollouts are two jobs.
  bool has_two_jobs() const { return role != RlRole::kAll; }
  /// Other ranks than the trainer's generate.
  bool is_disaggregated() const { return rollout_ranks > 0 || has_two_jobs(); }
  /// Asks for the choices of generation; a model without experts has none.
  bool replays_generation() const {
    return router_replay == RouterReplay::kR3 ||
           (router_replay == RouterReplay::kAuto && mode == RlMode::kAsync);
  }
  /// Updates are given their experts.
  bool replays_experts() const {
    return replays_generation() || router_replay == RouterReplay::kR2;
  }
  /// Prompts of a batch: what the weights are trained on between two versions.
  std::int64_t groups_per_batch() const { return groups_per_step * sync_every; }
  bool has_several_updates() const { return sync_every > 1 || epochs > 1; }
  /// The anchor of the ratio takes a pass of its own before the batch's first step. Of one step
  /// alone the step's own log-probabilities are the anchor, unless all must be known before it.
  bool finds_anchor() const {
    return old_logprobs == OldLogprobs::kRecompute &&
           (has_several_updates() || correction.normalizes() || correction.drops() ||
            router_replay == RouterReplay::kR2);
  }
  /// Versions that a token may be old when it is trained on.
  std::int64_t staleness() const { return mode == RlMode::kSync ? 0 : max_staleness; }
};

struct RolloutSection {
  std::int64_t max_new_tokens = 256;
  std::int64_t max_sequences = 64;
  std::int64_t prefill_tokens = 4096;
  std::vector<std::string> stop;
  double temperature = 1;
  double top_p = 1, min_p = 0;
  std::int64_t top_k = 0;
  std::int64_t tp = 1;
  bool merge_adapter = false;
  bool gather_weights = true;
  bool release_memory = false;
  rollout::CacheOptions caches;

  /// Some tokens are never drawn: training knows which from the ids that were left.
  bool has_cuts() const { return top_p < 1 || min_p > 0 || top_k > 0; }
};

/// Carrier of weights between trainer and rollouts.
enum class SyncBackend { kAuto, kGloo, kNccl, kHccl };
constexpr auto names_of(SyncBackend) { return spelled("auto", "gloo", "nccl", "hccl"); }

/// Weights on their way from the trainer's ranks to those that generate.
struct SyncSection {
  SyncBackend backend = SyncBackend::kAuto;
  std::int64_t bucket_bytes = std::int64_t{256} << 20;
  bool staged = false;
  std::int64_t verify = 50;
  std::string listen = "127.0.0.1:0", rendezvous;
  double rendezvous_timeout_s = 60, timeout_s = 120;
};

}  // namespace heddle::config
