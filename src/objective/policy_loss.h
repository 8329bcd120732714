#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace heddle::objective {

class SequenceSums;

/// Loss of one token, with l = log pi(token), r = exp(l - old), A its advantage and [lo, hi] =
/// [1 - clip_low, 1 + clip_high]. sg(x): x without a gradient.
enum class PolicyLoss {
  kPpo,        ///< -min(r A, clip(r, lo, hi) A); for A < 0 at most -dual_clip A (arXiv 1707.06347)
  kGspo,       ///< kPpo with the sequence's ratio exp(mean(l - old)), whose gradient flows to each
               ///< token alike (arXiv 2507.18071)
  kCispo,      ///< -sg(clip(r, lo, hi)) A l (arXiv 2506.13585)
  kSapo,       ///< -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (arXiv 2511.20347)
  kReinforce,  ///< -sg(w) A l, w the importance weight
  kDppo,       ///< -sg(min(r, dppo_cap)) A l while |pi - pi_old| <= dppo_delta where A pushes it on
  kDro,        ///< -(A l - dro_beta / 2 (l - old)^2) (arXiv 2405.19107)
};

/// How the losses of tokens add up, and what divides their sum over the whole step.
enum class LossMean {
  kToken,             ///< By the tokens (DAPO).
  kSequenceToken,     ///< Mean over the sequences of means over their tokens (GRPO).
  kSequenceSum,       ///< Mean over the sequences of sums over their tokens.
  kSequenceConstant,  ///< As kSequenceSum, divided by constant_length (Dr. GRPO).
  kSum,               ///< Not divided.
};

/// Estimators of KL(pi || reference) from x = l - reference.
enum class KlForm {
  kK1,      ///< x
  kK2,      ///< x^2 / 2
  kK3,      ///< exp(-x) + x - 1
  kK3Plus,  ///< Value of kK3 with the gradient of kK2, which is that of the KL.
};

/// Importance weights of what the behaviour policy drew: min(rho, importance_cap) of each token, or
/// of the product over a sequence.
enum class ImportanceWeight { kOff, kToken, kSequence };

/// Statistic of rho, or of k1 = -log rho, k2 = (log rho)^2 / 2, k3 = rho - log rho - 1, that must
/// lie within [rejection_low, rejection_high]; else the token (kToken) or the sequence takes no
/// part.
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
  kMaxK3,
};

struct PolicyOptions {
  double temperature = 1;  ///< At which tokens were drawn: the policy's logits are divided by it.
  PolicyLoss loss = PolicyLoss::kPpo;
  LossMean mean = LossMean::kToken;
  double clip_low = 0.2, clip_high = 0.2;  ///< Infinity: not clipped.
  double dual_clip = 0;                    ///< c > 1; 0: off.
  double sapo_tau_positive = 1.0, sapo_tau_negative = 1.05;
  double dppo_cap = 20, dppo_delta = 0.2;
  double dro_beta = 0.05;
  double constant_length = 1;  ///< For kSequenceConstant.

  double kl_coefficient = 0;  ///< Weight of the KL from the reference in the loss.
  KlForm kl_form = KlForm::kK3;
  bool kl_ratio_weighted = false;  ///< Times r, which makes k3's gradient that of the KL.

  ImportanceWeight importance = ImportanceWeight::kOff;
  double importance_cap = 2;
  Rejection rejection = Rejection::kOff;
  double rejection_low = 0, rejection_high = 0;
  /// Drops a sequence of negative advantage (its first token's) whose mean(behaviour - l) is above
  /// it (DeepSeek-V3.2); 0: off.
  double off_policy_delta = 0;

  /// A token's loss depends on no other token's log-probability.
  bool is_by_token() const;
};

/// Columns [n] about tokens that the policy chose, on one device and of one dtype. Undefined old:
/// sg(l), so that r = 1; behaviour: none apart from old (bypass); reference: no KL; clips: those of
/// the options.
struct PolicyTokens {
  at::Tensor old, behaviour, reference;
  at::Tensor advantages;
  at::Tensor clip_low, clip_high;  ///< Ratios lo and hi by token.
  // About the sequence of each token:
  at::Tensor sequence_tokens;  ///< Tokens of it that were chosen, on all ranks.
  at::Tensor first_advantage;  ///< Its first chosen token's; for off_policy_delta alone.

  /// The tokens from `first` on.
  PolicyTokens narrow(std::int64_t first, std::int64_t count) const;
};

/// Sums over tokens, to be added up over micro-batches and ranks.
struct PolicyStatistics {
  double ratio = 0, clipped_low = 0, clipped_high = 0;
  double old_kl = 0, reference_kl = 0;  ///< k1 of old against pi; k3 of pi against the reference.
  double mismatch_k1 = 0, mismatch_k3 = 0, mismatch_abs = 0;  ///< k1, k3 and |log| of rho.
  double weight = 0, weight_squared = 0;                      ///< Importance weights.
  double rejected = 0;
  double tokens = 0;                           ///< All of them, rejected or not.
  double entropy = 0;                          ///< For pi's distributions; filled by the objective.
  double ratio_max = 0, mismatch_abs_max = 0;  ///< Largest instead of sums.
};

/// The members of PolicyStatistics that add up; the first ones are PolicySums::sums.
inline constexpr double PolicyStatistics::*kPolicySums[] = {
    &PolicyStatistics::ratio,        &PolicyStatistics::clipped_low,
    &PolicyStatistics::clipped_high, &PolicyStatistics::old_kl,
    &PolicyStatistics::reference_kl, &PolicyStatistics::mismatch_k1,
    &PolicyStatistics::mismatch_k3,  &PolicyStatistics::mismatch_abs,
    &PolicyStatistics::weight,       &PolicyStatistics::weight_squared,
    &PolicyStatistics::rejected,     &PolicyStatistics::tokens,
    &PolicyStatistics::entropy};

/// Loss and statistics of tokens on the device. A new one holds nothing.
struct PolicySums {
  at::Tensor loss;     ///< 0-d
  at::Tensor sums;     ///< In the order of kPolicySums, without the entropy.
  at::Tensor largest;  ///< ratio_max, mismatch_abs_max

  void add(const PolicySums& other);
};

struct PolicyLossResult {
  PolicySums sums;
  at::Tensor d_logprobs;  ///< [n], of the loss.
};

/// Loss and its gradient by the log-probabilities [n] of tokens, in their dtype, on the device: the
/// host does not wait. Log-ratios are clamped to +-20 before exp, the KL to +-10; a clamped one has
/// no gradient. rho = old / behaviour, and importance weights multiply the loss; without a
/// behaviour policy apart from old rho = pi / old, which r holds already: then weights enter
/// kReinforce alone. A step's loss is the sum of all over divisor_of(). `sequences` (weights of 1)
/// may be null if options.is_by_token(); else the ranks that share them call together.
PolicyLossResult policy_loss(const at::Tensor& logprobs, const PolicyTokens& tokens,
                             const PolicyOptions& options, const SequenceSums* sequences);

/// Divisor of the sum over a step, from its numbers of tokens and of sequences with one.
double divisor_of(LossMean mean, double tokens, double sequences);

}  // namespace heddle::objective
