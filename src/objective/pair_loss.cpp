#include "objective/pair_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/expm1.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/sigmoid.h>

#include <limits>

#include "base/errors.h"

namespace heddle::objective {

namespace {

/// [P]: a loss and its derivatives by the log-probabilities of the two answers, as the loss sees
/// them: sums or means.
struct Slopes {
  at::Tensor loss, d_chosen, d_rejected;
};

Slopes of_difference(const at::Tensor& loss, const at::Tensor& d_difference) {
  return {loss, d_difference, -d_difference};
}

/// -(1 - e) log sigmoid(z) - e log sigmoid(-z), where dz/dx = beta.
Slopes logistic(const at::Tensor& z, const DpoOptions& options) {
  const double beta = options.beta, e = options.label_smoothing;
  return of_difference(-(1 - e) * at::log_sigmoid(z) - e * at::log_sigmoid(-z),
                       beta * (e * at::sigmoid(z) - (1 - e) * at::sigmoid(-z)));
}

/// 1 - exp(logp). An answer that is certain counts as the last value below: its odds are infinite.
at::Tensor complement(const at::Tensor& logp) {
  const bool is_double = logp.scalar_type() == at::kDouble;
  const double below_zero =
      is_double ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  return -at::expm1(logp.clamp_max(-below_zero));
}

Slopes odds_ratio(const at::Tensor& chosen, const at::Tensor& rejected, double beta) {
  const at::Tensor c = complement(chosen), r = complement(rejected);
  const at::Tensor log_odds = chosen - rejected - (c.log() - r.log());
  const at::Tensor slope = -beta * at::sigmoid(-log_odds);
  // The derivative of logit(exp x) is 1 / (1 - exp x).
  return {-beta * at::log_sigmoid(log_odds), slope / c, -slope / r};
}

bool sees_means(DpoLoss loss) { return loss != DpoLoss::kSigmoid && loss != DpoLoss::kHinge; }

Slopes slopes_of(const DpoPairs& pairs, const at::Tensor& x, const DpoOptions& options) {
  const at::Tensor& margin = pairs.reward_margin;
  switch (options.loss) {
    case DpoLoss::kSigmoid:
      return logistic(margin, options);
    case DpoLoss::kIpo: {
      const at::Tensor distance = x - 1 / (2 * options.beta);
      return of_difference(distance * distance, 2 * distance);
    }
    case DpoLoss::kHinge:
      return of_difference((1 - margin).clamp_min(0),
                           -options.beta * (margin < 1).to(x.scalar_type()));
    case DpoLoss::kOrpo:
      return odds_ratio(pairs.logp_chosen, pairs.logp_rejected, options.beta);
    case DpoLoss::kSimpo:
      return logistic(margin - options.simpo_gamma, options);
  }
  throw InternalError("a loss of preference tuning without a formula");
}

}  // namespace

DpoPairs dpo_loss(const AnswerLogprobs& chosen, const AnswerLogprobs& rejected,
                  const DpoOptions& options) {
  const auto seen = [&](const at::Tensor& sum, const AnswerLogprobs& answer) {
    return sees_means(options.loss) ? sum / answer.tokens : sum;
  };
  DpoPairs result;
  result.logp_chosen = seen(chosen.policy, chosen);
  result.logp_rejected = seen(rejected.policy, rejected);
  at::Tensor x = result.logp_chosen - result.logp_rejected;
  if (compares_with_reference(options.loss))
    x = x - (seen(chosen.reference, chosen) - seen(rejected.reference, rejected));
  result.reward_margin = options.beta * x;
  const Slopes slopes = slopes_of(result, x, options);
  const at::Tensor sft = options.sft_weight / chosen.tokens;
  result.loss = slopes.loss - sft * chosen.policy;
  result.d_chosen = seen(slopes.d_chosen, chosen) - sft;
  result.d_rejected = seen(slopes.d_rejected, rejected);
  return result;
}

RankingLoss ranking_loss(const at::Tensor& chosen, const at::Tensor& rejected) {
  const at::Tensor difference = chosen - rejected;
  return {-at::log_sigmoid(difference), -at::sigmoid(-difference)};
}

}  // namespace heddle::objective
