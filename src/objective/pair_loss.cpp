#include "objective/pair_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/sigmoid.h>

#include <algorithm>
#include <cmath>

namespace heddle::objective {
namespace {

/// -log sigmoid(x) and its derivative, for any size of x.
double minus_log_sigmoid(double x) {
  return std::max(-x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}
double sigmoid(double x) {
  return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}
double d_minus_log_sigmoid(double x) { return -sigmoid(-x); }

}  // namespace

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

RankingLoss ranking_loss(double chosen, double rejected) {
  const double difference = chosen - rejected;
  return {minus_log_sigmoid(difference), d_minus_log_sigmoid(difference)};
}

}  // namespace heddle::objective
