// Whole runs of `heddle rl` that train by the experts that generation chose.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "rl/rl_fixture.h"

namespace heddle {
namespace {

class ReplayOfExperts : public RlTest {
 protected:
  void SetUp() override {
    RlTest::SetUp();
    make_model("moe", {{"model_type", "qwen3_5_moe_text"},
                       {"num_experts", 6},
                       {"num_experts_per_tok", 2},
                       {"moe_intermediate_size", 24},
                       {"shared_expert_intermediate_size", 16},
                       // Random experts that differ: another choice is another distribution.
                       {"initializer_range", 0.3}});
  }
  Words moe(Words more) const {
    more.insert(more.begin(), {"model.path=" + (dir_ / "moe").string(), "model.dtype=float64"});
    return more;
  }
};

TEST_F(ReplayOfExperts, StandsAtTheTokensOfEveryTurn) {
  // Both sides have the same weights: by experts of other tokens they would differ.
  for (const char* method : {"full", "lora"}) {
    const Reports reports = train(episodes(
        std::string("turns-") + method,
        moe({std::string("train.method=") + method, "adapter.rank=4", "rl.router_replay=r3",
             "train.max_steps=2", "optim.lr=1e-2", "rollout.stop=[e, a]"})));
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
    const Reports reports = train(run(name, moe(more)));
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
      moe({"rl.mode=async", "rl.max_staleness=2", "rl.update_mode=keep", "optim.lr=1e-2",
           "train.max_steps=4", "rollout.max_sequences=5"}));
}

TEST_F(ReplayOfExperts, OfTheAnchorStaysOverTheStepsOfABatch) {
  const auto steps = [&](const std::string& name, const char* replay, Words more = {}) {
    more.insert(more.begin(), {"rl.epochs=3", "rl.old_logprobs=recompute", "train.max_steps=6",
                               "optim.lr=3e-2", std::string("rl.router_replay=") + replay});
    return train(run(name, moe(more))).steps;
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
      moe({"rl.epochs=2", "rl.old_logprobs=recompute", "train.max_steps=4", "optim.lr=1e-2",
           "rl.router_replay=r2"}));
}

TEST_F(ReplayOfExperts, OfTheAnchorIsRightWhereTokensAreOld) {
  // What is rejected must be known before the step, so that choices of generation cannot be taken.
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
  for (const train::StepInfo& step : train(run("anchored", moe(r2))).steps) {
    EXPECT_EQ(step.metrics.at("router_agreement"), 1);
    EXPECT_NEAR(step.metrics.at("ratio_max"), 1, 1e-9);
  }
  EXPECT_THAT(testing::message_of([&] { train(run("generated", moe(settings))); }),
              ::testing::HasSubstr("give rl.router_replay r2 or off"));
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
  EXPECT_THAT(testing::message_of([&] { run("bypass", moe({"rl.router_replay=r2"})); }),
              ::testing::HasSubstr("rl.router_replay: r2 takes the experts of the pass that finds "
                                   "the anchor: expected rl.old_logprobs recompute"));
  EXPECT_THAT(testing::message_of([&] {
                run("both", moe({"rl.router_replay=r3", "train.router_replay=other"}));
              }),
              ::testing::HasSubstr("rl.router_replay"));
}

}  // namespace
}  // namespace heddle
