#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

/// Figures that a run reports. Each is declared here once, with its unit and its meaning;
/// docs/metrics.md lists them.
namespace heddle {

struct Metric {
  enum class Unit {
    kNumber,
    kCount,
    kShare,  ///< 0 .. 1
    kNats,
    kReward,
    kTokens,
    kSeconds,
    kTokensPerSecond,
    kBytes,
    kBytesPerSecond
  };
  std::string_view name;  ///< In metrics.jsonl. `*` stands for a part that the run names.
  Unit unit;
  std::string_view meaning;
};

std::string_view to_string(Metric::Unit unit);

/// Figures of one step or evaluation, in the order in which they were set.
class Metrics {
 public:
  struct Entry {
    const Metric* metric;
    std::string name;  ///< The written one, with prefix and part.
    double value;
  };

  /// Replaces an earlier value of the same name.
  void set(const Metric& metric, double value) { put(metric, std::string(metric.name), value); }
  /// A figure by part: `metric`'s name with `part` in place of its `*`.
  void set(const Metric& metric, std::string_view part, double value);
  /// The figures of an evaluation, as "eval_NAME".
  void add_evaluation(const Metrics& figures);

  /// Null if it was not set.
  const double* find(std::string_view name) const;
  const double* find(const Metric& metric) const { return find(metric.name); }
  /// Throws InternalError if it was not set.
  double at(std::string_view name) const;
  double at(const Metric& metric) const { return at(metric.name); }
  bool empty() const { return entries_.empty(); }
  std::vector<Entry>::const_iterator begin() const { return entries_.begin(); }
  std::vector<Entry>::const_iterator end() const { return entries_.end(); }

 private:
  void put(const Metric& metric, std::string name, double value);

  std::vector<Entry> entries_;
};

namespace metric {

using Unit = Metric::Unit;

// Every step.
inline constexpr Metric kStep{"step", Unit::kCount,
                              "1 after the first update; 0: an evaluation before it"};
inline constexpr Metric kEpoch{"epoch", Unit::kNumber, "passes over the rows so far"};
inline constexpr Metric kLoss{"loss", Unit::kNats,
                              "weighted mean over the global batch; RL: its policy loss"};
inline constexpr Metric kLr{"lr", Unit::kNumber, "learning rate of the step"};
inline constexpr Metric kGradNorm{"grad_norm", Unit::kNumber,
                                  "norm of the whole gradient before clipping"};
inline constexpr Metric kGradCosPrev{
    "grad_cos_prev", Unit::kNumber,
    "cosine of the gradient with that of the step before, with `train.grad_cosine`; none in the "
    "first step and after a step without a gradient"};
inline constexpr Metric kTokens{"tokens", Unit::kTokens, "real tokens of the step, no padding"};
inline constexpr Metric kLossTokens{"loss_tokens", Unit::kTokens, "tokens that carry loss"};
inline constexpr Metric kTokensPerSecond{"tokens_per_s", Unit::kTokensPerSecond,
                                         "`tokens` over `step_s`"};
inline constexpr Metric kStepSeconds{
    "step_s", Unit::kSeconds,
    "wall time of the step; RL: generation and all that follows, see `gen_s` to `record_s`"};
inline constexpr Metric kUnixTime{"unix_time", Unit::kSeconds,  // of the wall clock
                                  "end of the step, since 1970 UTC"};
inline constexpr Metric kMfu{
    "mfu", Unit::kShare, "share of the hardware's speed of light, RL: in `update_s`; 0: unknown"};
inline constexpr Metric kMemoryBytes{"memory_bytes", Unit::kBytes,
                                     "peak of rank 0's device; resident set on the CPU"};

// Training.
inline constexpr Metric kEntropy{"entropy", Unit::kNats,
                                 "mean entropy of the predicted distributions"};
inline constexpr Metric kEntropyCoef{"entropy_coef", Unit::kNumber,
                                     "coefficient of the entropy in the step's loss"};
inline constexpr Metric kRecomputedLayers{"recomputed_layers", Unit::kCount,
                                          "layers that run again, under `train.recompute: auto`"};
inline constexpr Metric kAuxLoss{"aux_loss", Unit::kNumber,
                                 "load-balancing loss without its coefficient"};
inline constexpr Metric kMoeLoad{"moe_load_max_over_mean", Unit::kNumber,
                                 "tokens of the busiest expert over the mean, in the worst layer"};
inline constexpr Metric kMoeLoadMean{"moe_load_max_over_mean_avg", Unit::kNumber,
                                     "the same, mean over the layers"};
inline constexpr Metric kRouterAgreement{
    "router_agreement", Unit::kShare,
    "replayed choices of experts, by token and layer, that the router in training would have made"};
inline constexpr Metric kRouterReplayed{
    "router_replayed", Unit::kCount,
    "choices of experts, by token and layer, that were "
    "replayed; with `rl.router_replay` but for a row's last token"};
inline constexpr Metric kRouterMissing{
    "router_missing", Unit::kCount,
    "tokens whose experts generation did not tell, the last ones of completions; with "
    "`rl.router_replay: r3`"};
inline constexpr Metric kEvalLoss{"eval_loss", Unit::kNats,
                                  "loss of `data.eval`; RL: minus its mean reward"};
inline constexpr Metric kEval{"eval_*", Unit::kNumber,
                              "figure `*` of `data.eval`, or of `heddle eval` on `eval.input`"};
/// A figure of judged answers, which reports show as "eval_*".
inline constexpr Metric kJudged{"*", Unit::kNumber, "mean over the answers"};
inline constexpr Metric kSkippedSteps{"skipped_steps", Unit::kCount,
                                      "steps so far that `train.spike: skip` left out"};

// Classes.
inline constexpr Metric kAccuracy{
    "accuracy", Unit::kShare,
    "rows whose class is the predicted one; reward models: pairs whose chosen text scores higher"};
inline constexpr Metric kMacroF1{"f1_macro", Unit::kShare,
                                 "mean of F1 over the classes that rows have or are given"};

// Embeddings.
inline constexpr Metric kAccuracyAt1{"accuracy_at_1", Unit::kShare,
                                     "queries whose own positive is the nearest text"};
inline constexpr Metric kMrrAt10{"mrr_at_10", Unit::kNumber,
                                 "mean of 1 / rank of the own positive, 0 from rank 11 on"};

// Preferences and reward models.
inline constexpr Metric kRewardMargin{
    "reward_margin", Unit::kNats,
    "beta x: how much more the policy prefers the chosen answer than the reference does; of orpo "
    "and simpo, which have none: than the rejected one"};
inline constexpr Metric kRewardAccuracy{"reward_accuracy", Unit::kShare,
                                        "pairs whose margin is above 0"};
inline constexpr Metric kLogpsChosen{"logps_chosen", Unit::kNats,
                                     "log-probability of chosen answers under the policy"};
inline constexpr Metric kLogpsRejected{"logps_rejected", Unit::kNats,
                                       "log-probability of rejected answers under the policy"};
inline constexpr Metric kMargin{"margin", Unit::kNumber, "mean difference of the two scores"};

// Reinforcement learning.
inline constexpr Metric kVersion{"version", Unit::kCount, "updates before the step"};
inline constexpr Metric kRewardMean{"reward_mean", Unit::kReward, "of the completions, as judged"};
inline constexpr Metric kRewardStd{"reward_std", Unit::kReward, "their standard deviation"};
inline constexpr Metric kRewardPart{"reward_*", Unit::kReward,
                                    "mean of the part `*` of the reward: of one of several "
                                    "verifiers, or one that a program, server or environment "
                                    "tells"};
inline constexpr Metric kReward{"reward", Unit::kReward, "mean over the prompts of `data.eval`"};
inline constexpr Metric kLength{"length", Unit::kTokens, "mean of the answers to them"};
inline constexpr Metric kLengthMean{"length_mean", Unit::kTokens, "of the completions"};
inline constexpr Metric kLengthP99{"length_p99", Unit::kTokens, "99 % are not longer"};
inline constexpr Metric kTruncated{"truncated", Unit::kShare,
                                   "completions that ended at the limit"};
inline constexpr Metric kForks{
    "forks", Unit::kCount,
    "conversations of the step that went on in a row of their own, with `rl.history: render`"};
inline constexpr Metric kStalenessMean{"staleness_mean", Unit::kCount,
                                       "versions between drawing and training"};
inline constexpr Metric kStalenessMax{"staleness_max", Unit::kCount, "the largest of them"};
inline constexpr Metric kStalenessGroups{
    "staleness_groups_*", Unit::kCount,
    "groups of the step that are `*` versions old, in mode async"};
inline constexpr Metric kPartialRatio{"partial_ratio", Unit::kShare,
                                      "completions with tokens of several versions, in mode async"};
inline constexpr Metric kSpanMax{"span_max", Unit::kCount,
                                 "most versions between two tokens of a group, in mode async"};
inline constexpr Metric kSpanMean{"span_mean", Unit::kCount,
                                  "mean over the groups of these versions"};
inline constexpr Metric kGroupsRunning{"groups_running", Unit::kCount,
                                       "groups under way when the batch was there, in mode async"};
inline constexpr Metric kGroupsQueued{"groups_queued", Unit::kCount,
                                      "groups that were finished then and wait for a later batch"};
inline constexpr Metric kQueueAge{
    "queue_age_s", Unit::kSeconds,
    "mean time that the batch's groups waited in the queue, from their rewards to the batch"};
inline constexpr Metric kCapacity{
    "capacity", Unit::kCount,
    "groups that `rl.max_staleness` would have admitted besides then: held back by "
    "`rl.max_inflight_groups`, or there are no more prompts"};
inline constexpr Metric kGenTokens{"gen_tokens", Unit::kTokens, "drawn for the step"};
inline constexpr Metric kGenTokensPerSecond{"gen_tokens_per_s", Unit::kTokensPerSecond,
                                            "while tokens were drawn"};
inline constexpr Metric kGenTokensPerSecondPerRank{
    "gen_tokens_per_s_per_rank", Unit::kTokensPerSecond,
    "the same over the number of ranks that generate"};
inline constexpr Metric kGenBatch{"gen_batch", Unit::kNumber,
                                  "mean number of sequences in a pass that draws tokens"};
inline constexpr Metric kGenRecorded{"gen_recorded", Unit::kShare,
                                     "passes that draw tokens which replayed a recorded graph"};
inline constexpr Metric kGenPrefillSaved{
    "gen_prefill_saved", Unit::kTokens,
    "tokens of prompts that were not read, as another sequence's state holds them"};
inline constexpr Metric kGenPreempted{
    "gen_preempted", Unit::kCount,
    "times that a sequence under way lost its state, to changed weights or for want of memory, and "
    "is read again"};
inline constexpr Metric kGenSeconds{
    "gen_s", Unit::kSeconds,
    "time of drawing them; with `rl.rollout_ranks` beside the trainer's, and no part of `step_s`"};
inline constexpr Metric kScoreSeconds{
    "score_s", Unit::kSeconds,
    "alike, time in which nothing could be drawn before they were judged"};
inline constexpr Metric kRolloutRanks{"rollout_ranks", Unit::kCount,
                                      "ranks of `rl.rollout_ranks` that still generate"};
inline constexpr Metric kWaitSeconds{"wait_s", Unit::kSeconds,
                                     "the trainer's wait for its batch, with `rl.rollout_ranks`"};
inline constexpr Metric kSyncSeconds{"sync_s", Unit::kSeconds,
                                     "sending the weights to `rl.rollout_ranks`"};
inline constexpr Metric kSyncBytes{"sync_bytes", Unit::kBytes,
                                   "weights that went to `rl.rollout_ranks` in the step"};
inline constexpr Metric kSyncBytesPerSecond{"sync_bytes_per_s", Unit::kBytesPerSecond,
                                            "`sync_bytes` over `sync_wire_s`"};
inline constexpr Metric kSyncWireSeconds{
    "sync_wire_s", Unit::kSeconds,
    "from the first bytes of the weights until all rollouts have checked the last: gathering and "
    "sending; part of `sync_s`"};
inline constexpr Metric kSyncPauseSeconds{
    "sync_pause_s", Unit::kSeconds,
    "time that `rl.rollout_ranks` stood still for weights since the batch before, until their "
    "devices had them"};
inline constexpr Metric kRendezvousSeconds{
    "rendezvous_s", Unit::kSeconds,
    "time that trainer and `rl.rollout_ranks` took to meet, in a step before which they did"};
inline constexpr Metric kSyncDamaged{"sync_damaged", Unit::kCount,
                                     "buckets of them that were sent again"};
inline constexpr Metric kSyncVerified{
    "sync_verified", Unit::kCount,
    "tensors of `rl.rollout_ranks` that `sync.verify` compared with the trainer's in the step"};
inline constexpr Metric kReferenceSeconds{
    "reference_s", Unit::kSeconds,
    "log-probabilities under the reference, with `rl.reference.kl_coef`"};
inline constexpr Metric kOldLogprobsSeconds{
    "old_logprobs_s", Unit::kSeconds,
    "the anchor before a batch's first step, with `rl.old_logprobs: recompute` and several steps"};
inline constexpr Metric kCriticValuesSeconds{"critic_values_s", Unit::kSeconds,
                                             "the critic's values before the step"};
inline constexpr Metric kCriticUpdateSeconds{"critic_update_s", Unit::kSeconds,
                                             "its updates: forward, backward and optimizer"};
inline constexpr Metric kPrepareSeconds{"prepare_s", Unit::kSeconds,
                                        "advantages and micro-batches"};
inline constexpr Metric kUpdateSeconds{"update_s", Unit::kSeconds,
                                       "update of the policy: forward, backward and optimizer"};
inline constexpr Metric kRecordSeconds{"record_s", Unit::kSeconds,
                                       "`ledger.log`, `groups.jsonl`, and the hash of the weights"};
inline constexpr Metric kIdleTrainer{"idle_trainer", Unit::kShare, "`wait_s` over `step_s`"};
inline constexpr Metric kIdleRollout{
    "idle_rollout", Unit::kShare,
    "time since the batch before in which `rl.rollout_ranks` neither drew nor judged"};
inline constexpr Metric kGroupsAllRight{"groups_all_right", Unit::kCount,
                                        "groups whose completions all earned the same, above 0"};
inline constexpr Metric kGroupsAllWrong{"groups_all_wrong", Unit::kCount,
                                        "groups whose completions all earned the same, 0 or less"};
inline constexpr Metric kRejectedFiltered{"rejected_filtered", Unit::kCount,
                                          "groups without a difference to learn from"};
inline constexpr Metric kRejectedFilteredTokens{"rejected_filtered_tokens", Unit::kTokens,
                                                "mean of what these groups had drawn"};
inline constexpr Metric kRejectedFailed{"rejected_failed", Unit::kCount,
                                        "groups that could not be judged"};
inline constexpr Metric kRejectedFailedTokens{"rejected_failed_tokens", Unit::kTokens,
                                              "mean of what these groups had drawn"};
inline constexpr Metric kRejectedStale{"rejected_stale", Unit::kCount,
                                       "groups older than `rl.max_staleness` allows, whose prompts "
                                       "were issued again or, after `rl.stale_attempts`, left out"};
inline constexpr Metric kRejectedStaleTokens{
    "rejected_stale_tokens", Unit::kTokens,
    "mean of what these groups had drawn, where there are any"};
inline constexpr Metric kLedgerConsumed{"ledger_consumed", Unit::kCount,
                                        "groups that steps have consumed so far"};
inline constexpr Metric kLedgerRejected{"ledger_rejected", Unit::kCount,
                                        "groups that were rejected so far"};
inline constexpr Metric kLedgerPending{
    "ledger_pending", Unit::kCount,
    "groups that were dispatched and are neither consumed nor rejected"};
inline constexpr Metric kKl{"kl", Unit::kNats, "of the policy from the anchor"};
inline constexpr Metric kKlReference{"kl_ref", Unit::kNats, "of the policy from the reference"};
inline constexpr Metric kRatioMean{"ratio_mean", Unit::kNumber,
                                   "probability under the policy over that under the anchor"};
inline constexpr Metric kRatioMax{"ratio_max", Unit::kNumber, "the largest of them"};
inline constexpr Metric kClipLow{"clip_low", Unit::kShare, "tokens clipped at the lower bound"};
inline constexpr Metric kClipHigh{"clip_high", Unit::kShare, "tokens clipped at the upper bound"};
inline constexpr Metric kMismatchK1{"mismatch_k1", Unit::kNats,
                                    "estimator k1 of the KL of weights that drew from those that "
                                    "trained"};
inline constexpr Metric kMismatchK3{"mismatch_k3", Unit::kNats, "estimator k3 of it"};
inline constexpr Metric kMismatchK1OfAge{
    "mismatch_k1_age_*", Unit::kNats,
    "k1 of tokens that weights drew which were `*` versions older: 0, 1, or 2 and more; mode "
    "async"};
inline constexpr Metric kMismatchK3OfAge{"mismatch_k3_age_*", Unit::kNats, "k3 of these tokens"};
inline constexpr Metric kMismatchK1OfDepth{
    "mismatch_k1_depth_*", Unit::kNats,
    "k1 of tokens in quarter `*`, 0 to 3, of `data.max_length`, counted from the prompt's first "
    "token"};
inline constexpr Metric kMismatchK3OfDepth{"mismatch_k3_depth_*", Unit::kNats,
                                           "k3 of these tokens"};
inline constexpr Metric kMismatchAbsMean{"mismatch_abs_mean", Unit::kNats,
                                         "mean of |log| of the ratio of the two"};
inline constexpr Metric kMismatchAbsMax{"mismatch_abs_max", Unit::kNats, "the largest of them"};
inline constexpr Metric kMismatchChi2{"mismatch_chi2", Unit::kNumber,
                                      "mean square of the ratio less 1: the chi-squared distance"};
inline constexpr Metric kMismatchMultProbError{
    "mismatch_mult_prob_err", Unit::kNumber,
    "mean factor by which the probabilities differ, 1 for none: exp of the |log|"};
inline constexpr Metric kMismatchEss{"mismatch_ess", Unit::kShare,
                                     "effective sample size of the correction's weights"};
inline constexpr Metric kMismatchClipped{"mismatch_clipped", Unit::kShare,
                                         "tokens whose weight is `rl.correction.is_cap`"};
inline constexpr Metric kRejectedTokens{"rejected_tokens", Unit::kShare,
                                        "tokens that the correction left out"};
inline constexpr Metric kValueLoss{
    "value_loss", Unit::kNumber, "loss of the critic's values before the step, with advantage gae"};
inline constexpr Metric kValueClipped{
    "value_clipped", Unit::kShare,
    "tokens whose value has changed by more than `rl.critic.clip` before the step's last update"};
inline constexpr Metric kExplainedVariance{
    "explained_variance", Unit::kNumber,
    "1 - Var(R - V) / Var(R) of returns R and the critic's values V before the step; 0 where all "
    "returns are equal"};
inline constexpr Metric kCriticGradNorm{"critic_grad_norm", Unit::kNumber,
                                        "norm of the critic's gradient before clipping"};

}  // namespace metric

/// Every metric above in its order, but kJudged, which stands under `eval_*`.
std::span<const Metric* const> all_metrics();

/// docs/metrics.md: a table of them in Markdown.
std::string metrics_document();

}  // namespace heddle
