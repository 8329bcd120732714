#include "objective/pair_loss.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>

namespace heddle::objective {
namespace {

struct AnswerLogprob {
  double policy = 0, reference = 0, tokens = 1;
};
struct DpoPairLoss {
  double loss, d_chosen, d_rejected, reward_margin, logp_chosen, logp_rejected;
};

/// One pair by the formulas of tensors.
DpoPairLoss dpo_loss(const AnswerLogprob& chosen, const AnswerLogprob& rejected,
                     const DpoOptions& options) {
  const auto answers = [](const AnswerLogprob& answer) {
    const at::Tensor numbers =
        at::tensor({answer.policy, answer.reference, answer.tokens}, at::kDouble).unsqueeze(1);
    return AnswerLogprobs{numbers[0], numbers[1], numbers[2]};
  };
  const DpoPairs pairs = objective::dpo_loss(answers(chosen), answers(rejected), options);
  const auto number = [](const at::Tensor& of_pairs) { return of_pairs.item<double>(); };
  return {number(pairs.loss),          number(pairs.d_chosen),    number(pairs.d_rejected),
          number(pairs.reward_margin), number(pairs.logp_chosen), number(pairs.logp_rejected)};
}

const AnswerLogprob kAnswers[] = {{-3.5, -4, 3}, {-12, -9.25, 5}, {-0.2, -7, 1}, {-41, -40, 29}};

/// The formulas as the papers and TRL's DPOTrainer, ORPOTrainer and CPOTrainer write them.
double formula(const AnswerLogprob& chosen, const AnswerLogprob& rejected,
               const DpoOptions& options) {
  const bool is_mean = options.loss != DpoLoss::kSigmoid && options.loss != DpoLoss::kHinge;
  const double m = is_mean ? chosen.tokens : 1, n = is_mean ? rejected.tokens : 1;
  const double logratios = chosen.policy / m - rejected.policy / n,
               reference = chosen.reference / m - rejected.reference / n,
               logits = logratios - reference, beta = options.beta, e = options.label_smoothing;
  const auto logsigmoid = [](double x) { return std::log(1 / (1 + std::exp(-x))); };
  double loss = 0;
  if (options.loss == DpoLoss::kSigmoid)
    loss = -logsigmoid(beta * logits) * (1 - e) - logsigmoid(-beta * logits) * e;
  if (options.loss == DpoLoss::kIpo) loss = std::pow(logits - 1 / (2 * beta), 2);
  if (options.loss == DpoLoss::kHinge) loss = std::max(0.0, 1 - beta * logits);
  if (options.loss == DpoLoss::kOrpo) {
    const double c = chosen.policy / m, r = rejected.policy / n;
    loss = -beta * logsigmoid((c - r) - (std::log1p(-std::exp(c)) - std::log1p(-std::exp(r))));
  }
  if (options.loss == DpoLoss::kSimpo) {
    const double simpo = logratios - options.simpo_gamma / beta;
    loss = -logsigmoid(beta * simpo) * (1 - e) - logsigmoid(-beta * simpo) * e;
  }
  return loss + options.sft_weight * -chosen.policy / chosen.tokens;
}

TEST(DpoLoss, EqualsTheFormulasAndTheirSlopes) {
  for (const DpoLoss loss :
       {DpoLoss::kSigmoid, DpoLoss::kIpo, DpoLoss::kHinge, DpoLoss::kOrpo, DpoLoss::kSimpo}) {
    for (const DpoOptions& options :
         {DpoOptions{loss, 0.1, 0, 0}, DpoOptions{loss, 0.7, 0.2, 0.5, 1.25}}) {
      for (const AnswerLogprob& chosen : kAnswers) {
        for (const AnswerLogprob& rejected : kAnswers) {
          const DpoPairLoss pair = dpo_loss(chosen, rejected, options);
          EXPECT_NEAR(pair.loss, formula(chosen, rejected, options), 1e-12);
          const auto slope = [&](double d_chosen, double d_rejected) {
            const double step = 1e-6;
            AnswerLogprob up = chosen, down = chosen, up_other = rejected, down_other = rejected;
            up.policy += step * d_chosen, down.policy -= step * d_chosen;
            up_other.policy += step * d_rejected, down_other.policy -= step * d_rejected;
            return (formula(up, up_other, options) - formula(down, down_other, options)) /
                   (2 * step);
          };
          EXPECT_NEAR(pair.d_chosen, slope(1, 0), 1e-7);
          EXPECT_NEAR(pair.d_rejected, slope(0, 1), 1e-7);
        }
      }
    }
  }
}

TEST(DpoLoss, ReportsRewardsAndLogprobs) {
  const DpoPairLoss sums = dpo_loss(kAnswers[0], kAnswers[1], {});
  EXPECT_DOUBLE_EQ(sums.reward_margin, 0.1 * (0.5 - -2.75));
  EXPECT_DOUBLE_EQ(sums.logp_chosen, -3.5);
  const DpoPairLoss means = dpo_loss(kAnswers[0], kAnswers[1], {.loss = DpoLoss::kIpo});
  EXPECT_DOUBLE_EQ(means.logp_rejected, -12.0 / 5);
  EXPECT_DOUBLE_EQ(means.reward_margin, 0.1 * (0.5 / 3 - -2.75 / 5));
  // A policy that is its reference.
  const DpoPairLoss start = dpo_loss({-5, -5, 4}, {-7, -7, 6}, {});
  EXPECT_DOUBLE_EQ(start.loss, std::log(2));
  EXPECT_EQ(start.reward_margin, 0);
}

TEST(DpoLoss, SurvivesHugeMargins) {
  for (const double far : {-1e5, 1e5}) {
    const DpoPairLoss pair = dpo_loss({far, 0, 1}, {0, 0, 1}, {.beta = 1});
    EXPECT_DOUBLE_EQ(pair.loss, far < 0 ? 1e5 : 0);
    EXPECT_DOUBLE_EQ(pair.d_chosen, far < 0 ? -1 : 0);
  }
}

// Both losses as their papers' authors use them: the reference is not there to be read.
TEST(DpoLoss, WithoutAReferenceReportsMeans) {
  const auto answer = [](double sum, double tokens) {
    return AnswerLogprobs{at::tensor({sum}, at::kDouble), {}, at::tensor({tokens}, at::kDouble)};
  };
  for (const DpoLoss loss : {DpoLoss::kOrpo, DpoLoss::kSimpo}) {
    EXPECT_FALSE(compares_with_reference(loss));
    const DpoPairs pairs =
        objective::dpo_loss(answer(-6, 3), answer(-20, 5), {.loss = loss, .beta = 2});
    EXPECT_DOUBLE_EQ(pairs.logp_chosen.item<double>(), -2);
    EXPECT_DOUBLE_EQ(pairs.logp_rejected.item<double>(), -4);
    EXPECT_DOUBLE_EQ(pairs.reward_margin.item<double>(), 2 * (-2 - -4));
  }
  for (const DpoLoss loss : {DpoLoss::kSigmoid, DpoLoss::kIpo, DpoLoss::kHinge})
    EXPECT_TRUE(compares_with_reference(loss));
}

// An answer of which every token is certain has infinite odds.
TEST(DpoLoss, OddsOfCertainAnswersAreFinite) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const auto answer = [&](double sum) {
      return AnswerLogprobs{at::tensor({sum}, type), {}, at::tensor({4.0}, type)};
    };
    for (const auto& [chosen, rejected] :
         {std::pair(0.0, -8.0), {-8.0, 0.0}, {0.0, 0.0}, {-1e5, -8.0}, {-8.0, -1e5}}) {
      const DpoPairs pairs = objective::dpo_loss(
          answer(chosen), answer(rejected), {.loss = DpoLoss::kOrpo, .beta = 0.1, .sft_weight = 1});
      for (const at::Tensor& value : {pairs.loss, pairs.d_chosen, pairs.d_rejected})
        EXPECT_TRUE(std::isfinite(value.item<double>())) << chosen << " " << rejected;
      EXPECT_LE(pairs.d_chosen.item<double>(), 0);
      EXPECT_GE(pairs.d_rejected.item<double>(), 0);
    }
  }
}

TEST(RankingLoss, EqualsTheFormulaAndItsSlope) {
  const auto formula = [](double c, double r) { return -std::log(1 / (1 + std::exp(r - c))); };
  for (const double chosen : {-3.0, 0.25, 7.5}) {
    for (const double rejected : {-1.0, 0.25, 8.0}) {
      const RankingLoss pair =
          ranking_loss(at::tensor({chosen}, at::kDouble), at::tensor({rejected}, at::kDouble));
      EXPECT_NEAR(pair.loss.item<double>(), formula(chosen, rejected), 1e-12);
      EXPECT_NEAR(pair.d_chosen.item<double>(),
                  (formula(chosen + 1e-6, rejected) - formula(chosen - 1e-6, rejected)) / 2e-6,
                  1e-8);
    }
  }
}

}  // namespace
}  // namespace heddle::objective
