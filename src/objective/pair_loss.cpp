#include "objective/pair_loss.h"

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

DpoPairLoss dpo_loss(const AnswerLogprob& chosen, const AnswerLogprob& rejected,
                     const DpoOptions& options) {
  const bool is_mean = options.loss == DpoLoss::kIpo;
  const double of_chosen = is_mean ? 1 / chosen.tokens : 1,
               of_rejected = is_mean ? 1 / rejected.tokens : 1;
  DpoPairLoss result;
  result.logp_chosen = of_chosen * chosen.policy;
  result.logp_rejected = of_rejected * rejected.policy;
  const double x = result.logp_chosen - result.logp_rejected -
                   (of_chosen * chosen.reference - of_rejected * rejected.reference);
  const double beta = options.beta, e = options.label_smoothing;
  result.reward_margin = beta * x;
  double d_x = 0;
  switch (options.loss) {
    case DpoLoss::kSigmoid:
      result.loss = (1 - e) * minus_log_sigmoid(beta * x) + e * minus_log_sigmoid(-beta * x);
      d_x = beta * ((1 - e) * d_minus_log_sigmoid(beta * x) - e * d_minus_log_sigmoid(-beta * x));
      break;
    case DpoLoss::kIpo: {
      const double distance = x - 1 / (2 * beta);
      result.loss = distance * distance;
      d_x = 2 * distance;
      break;
    }
    case DpoLoss::kHinge:
      result.loss = std::max(0.0, 1 - beta * x);
      d_x = beta * x < 1 ? -beta : 0;
      break;
  }
  const double sft = options.sft_weight / chosen.tokens;
  result.loss -= sft * chosen.policy;
  result.d_chosen = of_chosen * d_x - sft;
  result.d_rejected = -of_rejected * d_x;
  return result;
}

RankingLoss ranking_loss(double chosen, double rejected) {
  const double difference = chosen - rejected;
  return {minus_log_sigmoid(difference), d_minus_log_sigmoid(difference)};
}

}  // namespace heddle::objective
