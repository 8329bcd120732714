#pragma once

#include <ATen/core/Tensor.h>

#include "objective/dpo_options.h"

namespace heddle::objective {

/// Log-probabilities [P] of answers given their prompts, sums over the tokens of loss weight x log
/// p; all of one dtype.
struct AnswerLogprobs {
  at::Tensor policy;
  at::Tensor reference;  ///< Undefined for a loss that has none.
  at::Tensor tokens;     ///< Sums of the loss weights.
};

/// [P] each.
struct DpoPairs {
  at::Tensor loss;
  at::Tensor d_chosen, d_rejected;  ///< Derivatives of the loss by the policy's two sums.
  /// beta x (policy - reference) of the chosen answer less that of the rejected one; beta x policy
  /// where a loss has no reference.
  at::Tensor reward_margin;
  /// Sums over a sequence; for kIpo, kOrpo and kSimpo means.
  at::Tensor logp_chosen, logp_rejected;
};

/// Losses of preference tuning by pair, on the device. With x = (chosen.policy -
/// rejected.policy) - (chosen.reference - rejected.reference) and e = label_smoothing:
///   kSigmoid  -(1 - e) log sigmoid(beta x) - e log sigmoid(-beta x)   (arXiv 2305.18290, eq. 7)
///   kIpo      (x - 1 / (2 beta))^2 of means over the tokens           (arXiv 2310.12036, eq. 17)
///   kHinge    max(0, 1 - beta x)                                      (arXiv 2305.10425)
/// and, with m and n the means over the tokens of the chosen and of the rejected answer under the
/// policy alone, and logit(p) = log p - log(1 - p):
///   kOrpo     -beta log sigmoid(logit(exp m) - logit(exp n))          (arXiv 2403.07691, eq. 7)
///   kSimpo    as kSigmoid of beta (m - n) - simpo_gamma               (arXiv 2405.14734, eq. 6)
/// plus sft_weight x the mean cross-entropy of the chosen answer's tokens (arXiv 2404.19733; ORPO's
/// eq. 6 has weight 1). The first three as loss_type sigmoid, ipo and hinge of TRL's DPOTrainer,
/// the others as its ORPOTrainer and as loss_type simpo of its CPOTrainer.
DpoPairs dpo_loss(const AnswerLogprobs& chosen, const AnswerLogprobs& rejected,
                  const DpoOptions& options);

/// [P] each.
struct RankingLoss {
  at::Tensor loss;
  at::Tensor
      d_chosen;  ///< Derivative by the score of the chosen text; by the other's its negative.
};

/// Bradley-Terry: -log sigmoid(chosen - rejected) of the two scores [P] of each pair, on the
/// device, as TRL's RewardTrainer.
RankingLoss ranking_loss(const at::Tensor& chosen, const at::Tensor& rejected);

}  // namespace heddle::objective
