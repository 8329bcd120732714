// Whole runs of `heddle rl` with corrections for tokens of another policy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "rl/rl_fixture.h"

namespace heddle {
namespace {

/// Runs whose tokens are up to three versions old.
class CorrectionTest : public RlTest {
 protected:
  static Words stale(Words more) {
    more.insert(more.begin(),
                {"rl.mode=async", "rl.max_staleness=3", "rollout.max_sequences=64", "optim.lr=1e-2",
                 "model.dtype=float64", "train.max_steps=4", "rl.old_logprobs=recompute"});
    return more;
  }
  std::vector<train::StepInfo> steps(const std::string& name, const Words& more) const {
    return train(run(name, stale(more))).steps;
  }
};

TEST_F(CorrectionTest, RejectedTokensLeaveTheDivisorOrStay) {
  const Words by_token = {"rl.correction.rs=token", "rl.correction.rs_bounds=[0.98, 1.02]",
                          "rl.correction.is=off"};
  const auto with = [&](const char* denominator) {
    Words words = by_token;
    words.push_back(std::string("rl.correction.rs_denominator=") + denominator);
    return steps(denominator, words);
  };
  const auto keep = with("keep"), drop = with("drop");
  // Nothing is rejected in the first step. In the second, of the same weights, the same is.
  EXPECT_EQ(keep[0].metrics.at("rejected_tokens"), 0);
  EXPECT_NEAR(keep[0].loss, drop[0].loss, 1e-9);
  const double share = keep[1].metrics.at("rejected_tokens");
  ASSERT_GT(share, 0.01);
  ASSERT_LT(share, 0.99);
  EXPECT_NEAR(drop[1].metrics.at("rejected_tokens"), share, 1e-9);
  EXPECT_EQ(drop[1].loss_tokens, std::llround((1 - share) * keep[1].loss_tokens));
  EXPECT_NEAR(drop[1].loss, keep[1].loss / (1 - share), 1e-9);
  EXPECT_NEAR(drop[1].grad_norm, keep[1].grad_norm / (1 - share), 1e-7 * keep[1].grad_norm);
}

TEST_F(CorrectionTest, WeightsAreDividedByTheirMeanOverTheBatch) {
  const auto plain = steps("plain", {"rl.correction.is=sequence", "rl.correction.is_cap=0"}),
             normalized =
                 steps("normalized", {"rl.correction.is=sequence", "rl.correction.is_cap=0",
                                      "rl.correction.is_batch_normalize=true"});
  EXPECT_NEAR(normalized[0].loss, plain[0].loss, 1e-9);
  // One factor for the step's gradient; the effective sample size does not see it.
  EXPECT_GT(std::abs(normalized[1].grad_norm / plain[1].grad_norm - 1), 1e-3);
  EXPECT_NEAR(normalized[1].loss / plain[1].loss, normalized[1].grad_norm / plain[1].grad_norm,
              1e-6);
  EXPECT_NEAR(normalized[1].metrics.at("mismatch_ess"), plain[1].metrics.at("mismatch_ess"), 1e-9);
}

TEST_F(CorrectionTest, MicroBatchesChangeNothing) {
  expect_no_change_by_micro_batches(
      stale({"rl.correction.rs=geometric", "rl.correction.rs_bounds=[0.99, 1.01]",
             "rl.correction.rs_denominator=drop", "rl.correction.is_batch_normalize=true",
             "rl.algorithm.mean=seq_mean_token_mean"}));
}

TEST_F(CorrectionTest, AStepWhoseTokensAreAllRejectedLeavesThePolicyAsItIs) {
  const auto none = steps("none", {"rl.correction.rs=token", "rl.correction.rs_bounds=[7, 8]",
                                   "rl.correction.rs_denominator=drop"});
  for (const train::StepInfo& step : none) {
    EXPECT_EQ(step.metrics.at("rejected_tokens"), 1);
    EXPECT_EQ(step.loss_tokens, 0);
    EXPECT_EQ(step.lr, 0);
  }
}

TEST_F(CorrectionTest, WhatMustBeKnownBeforeAStepNeedsAnAnchorOfItsOwn) {
  const auto message = [&](Words words) { return testing::message_of([&] { run("bad", words); }); };
  EXPECT_THAT(
      message({"rl.correction.is_batch_normalize=true"}),
      ::testing::HasSubstr("rl.correction.is_batch_normalize: needs the ratios of the whole "
                           "batch before its first step: expected rl.old_logprobs "
                           "recompute, found rollout"));
  EXPECT_THAT(message({"rl.correction.rs=token", "rl.correction.rs_denominator=drop",
                       "rl.mode=async", "rl.old_logprobs=loglinear"}),
              ::testing::HasSubstr("rl.correction.rs_denominator: needs"));
}

}  // namespace
}  // namespace heddle
