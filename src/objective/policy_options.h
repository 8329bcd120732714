#pragma once

#include "base/named_enum.h"

namespace heddle::objective {

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
constexpr auto names_of(PolicyLoss) {
  return spelled("ppo", "gspo", "cispo", "sapo", "reinforce", "dppo", "dro");
}

/// How the losses of tokens add up, and what divides their sum over the whole step.
enum class LossMean {
  kToken,             ///< By the tokens (DAPO).
  kSequenceToken,     ///< Mean over the sequences of means over their tokens (GRPO).
  kSequenceSum,       ///< Mean over the sequences of sums over their tokens.
  kSequenceConstant,  ///< Divides kSequenceSum by constant_length (Dr. GRPO).
  kSum,               ///< Not divided.
};
constexpr auto names_of(LossMean) {
  return spelled("token_mean", "seq_mean_token_mean", "seq_mean_token_sum",
                 "seq_mean_token_sum_norm", "token_sum");
}

/// Estimators of KL(pi || reference) from x = l - reference.
enum class KlForm {
  kK1,      ///< x
  kK2,      ///< x^2 / 2
  kK3,      ///< exp(-x) + x - 1
  kK3Plus,  ///< Value of kK3 with the gradient of kK2, which is that of the KL.
};
constexpr auto names_of(KlForm) { return spelled("k1", "k2", "k3", "k3+"); }

/// Importance weights of what the behaviour policy drew: min(rho, importance_cap) of each token, or
/// of the product over a sequence; without a cap of 0.
enum class ImportanceWeight { kOff, kToken, kSequence };
constexpr auto names_of(ImportanceWeight) { return spelled("off", "token", "sequence"); }

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
constexpr auto names_of(Rejection) {
  return spelled("off", "token", "sequence", "geometric", "seq_sum_k1", "seq_mean_k1", "seq_max_k1",
                 "seq_sum_k2", "seq_mean_k2", "seq_max_k2", "seq_sum_k3", "seq_mean_k3",
                 "seq_max_k3");
}

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
  /// Tokens of the longest sequence, by which PolicyTokens::depth is told; 0: it is not.
  std::int64_t longest_sequence = 0;

  /// Weight of the mean entropy of the policy's distributions, which the loss raises: a token
  /// counts as in `mean`, rejected or not.
  double entropy_coefficient = 0;
  double kl_coefficient = 0;  ///< Weight of the KL from the reference in the loss.
  KlForm kl_form = KlForm::kK3;
  bool kl_ratio_weighted = false;  ///< Times r, which makes k3's gradient that of the KL.

  /// Without an old policy: it lies between behaviour and pi by the age of each token, see
  /// interpolation().
  bool interpolates_old = false;
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

}  // namespace heddle::objective
