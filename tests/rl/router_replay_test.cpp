// Whole runs of `heddle rl` that train by the experts that generation chose.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "rl/rl_fixture.h"

namespace heddle {
namespace {

using ReplayOfExperts = RlTest;

TEST_F(ReplayOfExperts, StandsAtTheTokensOfEveryTurn) {
  // Both sides have the same weights: by experts of other tokens they would differ.
  for (const char* method : {"full", "lora"}) {
    const Reports reports =
        train(episodes(std::string("turns-") + method,
                       with_experts({std::string("train.method=") + method, "adapter.rank=4",
                                     "rl.router_replay=r3", "train.max_steps=2", "optim.lr=1e-2",
                                     "rollout.stop=[e, a]"})));
    for (const train::StepInfo& step : reports.steps) {
      EXPECT_EQ(step.metrics.at("router_agreement"), 1) << method;
      EXPECT_NEAR(step.metrics.at("ratio_mean"), 1, 1e-7) << method;
      EXPECT_NEAR(step.metrics.at("mismatch_abs_max"), 0, 1e-6) << method;
    }
  }
}

TEST_F(ReplayOfExperts, IsOnInModeAsyncAlone) {
  // Weights that have moved on choose others than those that drew a token.
  const auto mismatch = [&](const std::string& name, Words more) {
    more.insert(more.begin(), {"rl.max_staleness=2", "rl.update_mode=keep", "optim.lr=3e-2",
                               "rollout.max_sequences=5", "rollout.max_new_tokens=12"});
    const Reports reports = train(run(name, with_experts(more)));
    for (const train::StepInfo& step : reports.steps) {
      const double* agreement = step.metrics.find("router_agreement");
      EXPECT_EQ(agreement == nullptr, name == "off");
      if (agreement == nullptr) continue;
      // The weights that drew all tokens of the first step are those that it trains.
      EXPECT_LE(*agreement, 1);
      EXPECT_EQ(*agreement == 1, step.step == 1);
      EXPECT_GT(*agreement, 0.3);
    }
    return reports.mean("mismatch_abs_mean", 0, reports.steps.size());
  };
  const double by_default = mismatch("default", {"rl.mode=async"});
  EXPECT_EQ(by_default, mismatch("r3", {"rl.mode=async", "rl.router_replay=r3"}));
  EXPECT_GT(std::abs(by_default - mismatch("off", {"rl.mode=async", "rl.router_replay=off"})),
            1e-3);
}

TEST_F(ReplayOfExperts, IsTheSameForEveryCutIntoMicroBatches) {
  expect_no_change_by_micro_batches(
      with_experts({"rl.mode=async", "rl.max_staleness=2", "rl.update_mode=keep", "optim.lr=1e-2",
                    "train.max_steps=4", "rollout.max_sequences=5"}));
}

TEST_F(ReplayOfExperts, OfTheAnchorStaysOverTheStepsOfABatch) {
  const auto steps = [&](const std::string& name, const char* replay, Words more = {}) {
    more.insert(more.begin(), {"rl.epochs=3", "rl.old_logprobs=recompute", "train.max_steps=6",
                               "optim.lr=3e-2", std::string("rl.router_replay=") + replay});
    return train(run(name, with_experts(more))).steps;
  };
  const auto off = steps("off", "off"), r2 = steps("r2", "r2");
  ASSERT_EQ(r2.size(), 6u);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(off[i].metrics.find("router_agreement"), nullptr);
    const double agreement = r2[i].metrics.at("router_agreement");
    // The weights before the first step chose them; those after it would choose others.
    EXPECT_EQ(agreement == 1, i % 3 == 0) << i << " " << agreement;
    if (i % 3 == 0) {
      EXPECT_NEAR(r2[i].metrics.at("ratio_max"), 1, 1e-9) << i;
    }
  }
  EXPECT_EQ(off[0].loss, r2[0].loss);
  EXPECT_GT(std::abs(off[2].metrics.at("ratio_max") - r2[2].metrics.at("ratio_max")), 1e-6);
  expect_no_change_by_micro_batches(
      with_experts({"rl.epochs=2", "rl.old_logprobs=recompute", "train.max_steps=4",
                    "optim.lr=1e-2", "rl.router_replay=r2"}));
}

TEST_F(ReplayOfExperts, OfGenerationReachesTheAnchor) {
  // Weights that have moved on choose others than those that drew a token, so that an anchor by the
  // trainer's own choices is another one.
  const auto steps = [&](const std::string& name, const Words& more) {
    Words all = {"rl.mode=async",     "rl.max_staleness=2",        "rl.update_mode=keep",
                 "optim.lr=3e-2",     "rl.old_logprobs=recompute", "rollout.max_sequences=5",
                 "train.max_steps=6", "rollout.max_new_tokens=12"};
    all.insert(all.end(), more.begin(), more.end());
    return train(run(name, with_experts(all))).steps;
  };
  const auto found = steps("several", {"rl.epochs=2", "rl.router_replay=r3"}),
             own = steps("several-own", {"rl.epochs=2", "rl.router_replay=off"});
  ASSERT_EQ(found.size(), 6u);
  double least = 1, differs = 0;
  for (std::size_t i = 0; i < 6; ++i) {
    const Metrics& step = found[i].metrics;
    least = std::min(least, step.at("router_agreement"));
    // The anchor is the policy before the first step, by the same experts.
    EXPECT_EQ(std::abs(step.at("ratio_max") - 1) < 1e-9, i % 2 == 0) << i;
    differs =
        std::max(differs, std::abs(step.at("mismatch_k1") - own[i].metrics.at("mismatch_k1")));
  }
  EXPECT_LT(least, 0.99);
  EXPECT_GT(differs, 1e-4);
  // One step alone finds the anchor in its own pass: until the weights part after the first step,
  // both runs are one.
  const auto alone = steps("alone", {"rl.router_replay=r3"});
  EXPECT_NEAR(found[0].loss, alone[0].loss, 1e-9);
  EXPECT_NEAR(found[0].grad_norm, alone[0].grad_norm, 1e-9);
  // A value that must be known before the step is found in a pass apart, and gives that step's
  // numbers. Three steps: a rate at which choices change makes much of a rounding later on.
  const Words kept = {"rl.correction.rs=token", "rl.correction.rs_bounds=[0, 1e9]",
                      "train.max_steps=3"};
  Words apart = kept;
  apart.push_back("rl.correction.rs_denominator=drop");
  const auto within = steps("within", kept), before = steps("before", apart);
  ASSERT_EQ(before.size(), within.size());
  double agreement = 1;
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(within[i].metrics.find("old_logprobs_s"), nullptr);
    EXPECT_NE(before[i].metrics.find("old_logprobs_s"), nullptr);
    EXPECT_NEAR(before[i].loss, within[i].loss, 1e-9) << i;
    EXPECT_GT(within[i].grad_norm, 1e-3) << i;
    EXPECT_NEAR(before[i].grad_norm, within[i].grad_norm, 1e-9 * (1 + within[i].grad_norm)) << i;
    for (const char* figure :
         {"mismatch_k1", "mismatch_k3", "mismatch_abs_max", "mismatch_ess", "router_agreement"})
      EXPECT_NEAR(before[i].metrics.at(figure), within[i].metrics.at(figure), 1e-9) << figure << i;
    agreement = std::min(agreement, before[i].metrics.at("router_agreement"));
  }
  EXPECT_LT(agreement, 0.999);
}

TEST_F(ReplayOfExperts, CountsTheChoicesThatItTakes) {
  const Words settings = {"train.max_steps=2", "optim.lr=1e-2"};
  const auto steps = [&](const std::string& name, const Words& more) {
    Words all = settings;
    all.insert(all.end(), more.begin(), more.end());
    return train(run(name, with_experts(all))).steps;
  };
  for (const train::StepInfo& step : steps("r3", {"rl.router_replay=r3"})) {
    // Four groups of four, each row but for its last token, two experts in each of four layers.
    const double rows = 16, choices = 2 * 4;
    EXPECT_EQ(step.metrics.at("router_missing"), rows);
    EXPECT_EQ(step.metrics.at("router_replayed"),
              choices * (static_cast<double>(step.tokens) - rows));
  }
  for (const train::StepInfo& step : steps("own", {})) {
    EXPECT_EQ(step.metrics.find("router_missing"), nullptr);
    EXPECT_EQ(step.metrics.find("router_replayed"), nullptr);
  }
}

TEST_F(ReplayOfExperts, OfTheAnchorIsRightWhereTokensAreOld) {
  const Words settings = {"rl.mode=async",
                          "rl.max_staleness=2",
                          "rl.old_logprobs=recompute",
                          "rl.correction.rs=geometric",
                          "rl.correction.rs_denominator=drop",
                          "train.max_steps=4",
                          "optim.lr=1e-2",
                          "rollout.max_sequences=64"};
  Words r2 = settings;
  r2.push_back("rl.router_replay=r2");
  for (const train::StepInfo& step : train(run("anchored", with_experts(r2))).steps) {
    EXPECT_EQ(step.metrics.at("router_agreement"), 1);
    EXPECT_NEAR(step.metrics.at("ratio_max"), 1, 1e-9);
  }
}

TEST_F(ReplayOfExperts, NeedsExperts) {
  EXPECT_THAT(testing::message_of([&] { train(run("dense", {"rl.router_replay=r3"})); }),
              ::testing::HasSubstr(
                  "rl.router_replay: r3 is for models with experts, and this one has none"));
  EXPECT_THAT(testing::message_of([&] {
                train(run("dense-r2", {"rl.router_replay=r2", "rl.old_logprobs=recompute"}));
              }),
              ::testing::HasSubstr(
                  "rl.router_replay: r2 is for models with experts, and this one has none"));
  EXPECT_THAT(testing::message_of([&] { run("bypass", with_experts({"rl.router_replay=r2"})); }),
              ::testing::HasSubstr("rl.router_replay: r2 takes the experts of the pass that finds "
                                   "the anchor: expected rl.old_logprobs recompute"));
  EXPECT_THAT(testing::message_of([&] {
                run("both", with_experts({"rl.router_replay=r3", "train.router_replay=other"}));
              }),
              ::testing::HasSubstr("rl.router_replay"));
}

}  // namespace
}  // namespace heddle
