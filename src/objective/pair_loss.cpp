#include "objective/pair_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/sigmoid.h>

namespace heddle::objective {

DpoPairs dpo_loss(const AnswerLogprobs& chosen, const AnswerLogprobs& rejected,
                  const DpoOptions& options) {
  const bool is_mean = options.loss == DpoLoss::kIpo;
  const auto seen = [&](const at::Tensor& sum, const AnswerLogprobs& answer) {
    return is_mean ? sum / answer.tokens : sum;
  };
  DpoPairs result;
  result.logp_chosen = seen(chosen.policy, chosen);
  result.logp_rejected = seen(rejected.policy, rejected);
  const at::Tensor x = result.logp_chosen - result.logp_rejected -
                       (seen(chosen.reference, chosen) - seen(rejected.reference, rejected));
  const double beta = options.beta, e = options.label_smoothing;
  result.reward_margin = beta * x;
  const at::Tensor& margin = result.reward_margin;
  at::Tensor d_x;
  switch (options.loss) {
    case DpoLoss::kSigmoid:
      result.loss = -(1 - e) * at::log_sigmoid(margin) - e * at::log_sigmoid(-margin);
      d_x = beta * (e * at::sigmoid(margin) - (1 - e) * at::sigmoid(-margin));
      break;
    case DpoLoss::kIpo: {
      const at::Tensor distance = x - 1 / (2 * beta);
      result.loss = distance * distance;
      d_x = 2 * distance;
      break;
    }
    case DpoLoss::kHinge:
      result.loss = (1 - margin).clamp_min(0);
      d_x = -beta * (margin < 1).to(x.scalar_type());
      break;
  }
  const at::Tensor sft = options.sft_weight / chosen.tokens;
  result.loss = result.loss - sft * chosen.policy;
  result.d_chosen = seen(d_x, chosen) - sft;
  result.d_rejected = -seen(d_x, rejected);
  return result;
}

RankingLoss ranking_loss(const at::Tensor& chosen, const at::Tensor& rejected) {
  const at::Tensor difference = chosen - rejected;
  return {-at::log_sigmoid(difference), -at::sigmoid(-difference)};
}

}  // namespace heddle::objective
