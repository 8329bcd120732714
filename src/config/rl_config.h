#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "config/named_enum.h"

/// Sections of `heddle rl`; see run_config.h.
namespace heddle::config {

enum class RlMode { kSync, kAsync };
template <>
inline constexpr std::array<std::string_view, 2> kNames<RlMode>{"sync", "async"};

enum class StalePolicy { kWait, kDrop };
template <>
inline constexpr std::array<std::string_view, 2> kNames<StalePolicy>{"wait", "drop"};

/// Fate of running sequences when the weights change.
enum class UpdateMode { kRecompute, kWait, kAbort, kKeep, kPin };
template <>
inline constexpr std::array<std::string_view, 5> kNames<UpdateMode>{"recompute", "wait", "abort",
                                                                    "keep", "pin"};

enum class OldLogprobs { kRollout, kRecompute };
template <>
inline constexpr std::array<std::string_view, 2> kNames<OldLogprobs>{"rollout", "recompute"};

enum class Overlong { kOff, kPunish, kMask };
template <>
inline constexpr std::array<std::string_view, 3> kNames<Overlong>{"off", "punish", "mask"};

enum class Advantage {
  kGrpo,
  kDrGrpo,
  kRloo,
  kReinforcePlusPlus,
  kReinforcePlusPlusBaseline,
  kOpo
};
template <>
inline constexpr std::array<std::string_view, 6> kNames<Advantage>{
    "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "opo"};

enum class PolicyLoss { kPpo, kGspo, kCispo, kSapo, kReinforce, kDppo, kDro };
template <>
inline constexpr std::array<std::string_view, 7> kNames<PolicyLoss>{
    "ppo", "gspo", "cispo", "sapo", "reinforce", "dppo", "dro"};

enum class LossMean { kToken, kSequenceToken, kSequenceSum, kSequenceConstant, kSum };
template <>
inline constexpr std::array<std::string_view, 5> kNames<LossMean>{
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm",
    "token_sum"};

enum class KlForm { kK1, kK2, kK3, kK3Plus };
template <>
inline constexpr std::array<std::string_view, 4> kNames<KlForm>{"k1", "k2", "k3", "k3+"};

enum class KlWhere { kLoss, kReward };
template <>
inline constexpr std::array<std::string_view, 2> kNames<KlWhere>{"loss", "reward"};

enum class ImportanceWeight { kOff, kToken, kSequence };
template <>
inline constexpr std::array<std::string_view, 3> kNames<ImportanceWeight>{"off", "token",
                                                                          "sequence"};

enum class Rejection {
  kOff,
  kToken,
  kSequence,
  kGeometric,
  kSumK1,
  kMeanK1,
  kMaxK1,
  kSumK2,
  kMeanK2,
  kMaxK2,
  kSumK3,
  kMeanK3,
  kMaxK3
};
template <>
inline constexpr std::array<std::string_view, 13> kNames<Rejection>{
    "off",         "token",       "sequence",   "geometric",   "seq_sum_k1",
    "seq_mean_k1", "seq_max_k1",  "seq_sum_k2", "seq_mean_k2", "seq_max_k2",
    "seq_sum_k3",  "seq_mean_k3", "seq_max_k3"};

struct RlAlgorithm {
  Advantage advantage = Advantage::kGrpo;
  PolicyLoss loss = PolicyLoss::kPpo;
  LossMean mean = LossMean::kToken;
  double clip_low = 0.2, clip_high = 0.2;
  double dual_clip = 0;
  double sapo_tau_positive = 1, sapo_tau_negative = 1.05;
  double dppo_cap = 20, dppo_delta = 0.2;
  double dro_beta = 0.05;
  double gamma = 1;
};

struct RlCorrection {
  ImportanceWeight is = ImportanceWeight::kToken;
  double is_cap = 2;
  Rejection rs = Rejection::kOff;
  std::array<double, 2> rs_bounds = {0, 3};
  double off_policy_delta = 0;
};

struct RlReference {
  double kl_coef = 0;
  KlWhere kl_where = KlWhere::kLoss;
  KlForm kl_form = KlForm::kK3;
  bool kl_ratio_weighted = false;
};

enum class CombineRewards { kSum, kProduct };
template <>
inline constexpr std::array<std::string_view, 2> kNames<CombineRewards>{"sum", "product"};

struct RlReward {
  std::map<std::string, double> verifiers;        ///< Name -> weight.
  std::map<std::string, std::string> parameters;  ///< Verifier -> JSON object.
  CombineRewards combine = CombineRewards::kSum;
  std::vector<std::string> command;
  std::int64_t workers = 2;
  std::string url, token;
  double timeout_s = 30;
  bool shuffle = false;
};

struct RlSection {
  RlMode mode = RlMode::kSync;
  std::int64_t trainer_ranks = 0, rollout_ranks = 0;
  std::int64_t max_staleness = 1;
  StalePolicy stale_policy = StalePolicy::kWait;
  UpdateMode update_mode = UpdateMode::kRecompute;
  std::int64_t groups_per_step = 32, samples_per_group = 8;
  std::int64_t max_inflight_groups = 0;
  OldLogprobs old_logprobs = OldLogprobs::kRollout;
  Overlong overlong = Overlong::kOff;
  std::int64_t overlong_buffer = 0;
  double overlong_penalty = 1;
  bool dynamic_sampling = false;
  std::int64_t max_attempts = 4;
  std::int64_t groups_every = 10;
  RlAlgorithm algorithm;
  RlCorrection correction;
  RlReference reference;
  RlReward reward;

  /// Other ranks than the trainer's generate.
  bool is_disaggregated() const { return rollout_ranks > 0; }
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

  /// Some tokens are never drawn: training knows which from the ids that were left.
  bool has_cuts() const { return top_p < 1 || min_p > 0 || top_k > 0; }
};

/// Carrier of weights between trainer and rollouts.
enum class SyncBackend { kAuto, kGloo, kNccl, kHccl };
template <>
inline constexpr std::array<std::string_view, 4> kNames<SyncBackend>{"auto", "gloo", "nccl",
                                                                     "hccl"};

/// Weights on their way from the trainer's ranks to those that generate.
struct SyncSection {
  SyncBackend backend = SyncBackend::kAuto;
  std::int64_t bucket_bytes = std::int64_t{256} << 20;
  bool staged = false;
  double rendezvous_timeout_s = 60, timeout_s = 120;
};

}  // namespace heddle::config
