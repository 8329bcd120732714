#pragma once

#include <ATen/core/Tensor.h>

#include "objective/dpo_options.h"

namespace heddle::objective {

/// Log-probabilities [P] of answers given their prompts, sums over the tokens of loss weight x log
/// p; all of one dtype.
struct AnswerLogprobs {
  at::Tensor policy, reference;
  at::Tensor tokens;  ///< Sums of the loss weights.
};

/// [P] each.
struct DpoPairs {
  at::Tensor loss;
  at::Tensor d_chosen, d_rejected;  ///< Derivatives of the loss by the policy's two sums.
  /// beta x (policy - reference) of the chosen answer less that of the rejected one.
  at::Tensor reward_margin;
  at::Tensor logp_chosen, logp_rejected;  ///< Sums over a sequence; for kIpo means.
};

/// Direct preference optimisation of each pair, on the device. With x = (chosen.policy -
/// rejected.policy) - (chosen.reference - rejected.reference) and e = label_smoothing:
///   kSigmoid  -(1 - e) log sigmoid(beta x) - e log sigmoid(-beta x)   (arXiv 2305.18290, eq. 7)
///   kIpo      (x - 1 / (2 beta))^2 of means over the tokens           (arXiv 2310.12036, eq. 17)
///   kHinge    max(0, 1 - beta x)                                      (arXiv 2305.10425)
/// plus sft_weight x the mean cross-entropy of the chosen answer's tokens (arXiv 2404.19733). The
/// first three as loss_type sigmoid, ipo and hinge of TRL's DPOTrainer.
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
