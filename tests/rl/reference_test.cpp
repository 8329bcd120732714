// Whole runs of `heddle rl` whose reference follows the policy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "rl/rl_fixture.h"
#include "train/adapter_start.h"

namespace heddle {
namespace {

class FollowingReference : public RlTest {
 protected:
  static Words settings(const char* method, Words more) {
    more.insert(more.begin(),
                {std::string("train.method=") + method, "adapter.rank=4", "model.dtype=float64",
                 "optim.lr=1e-2", "rl.reference.kl_coef=0.1", "train.max_steps=6"});
    return more;
  }
  std::string result(const std::string& name, const char* method) const {
    const bool is_adapter = std::string(method) == "lora";
    return files::read(dir_ / name / "final" /
                       (is_adapter ? "adapter_model.safetensors" : "model.safetensors"));
  }
  std::vector<double> kls(const std::string& name, const char* method, Words more) const {
    std::vector<double> values;
    for (const train::StepInfo& step : train(run(name, settings(method, std::move(more)))).steps)
      values.push_back(step.metrics.at("kl_ref"));
    return values;
  }
};

TEST_F(FollowingReference, BecomesThePolicyAfterSoManySteps) {
  for (const char* method : {"full", "lora"}) {
    const auto fixed = kls(std::string("fixed-") + method, method, {});
    const auto follows =
        kls(std::string("follows-") + method, method, {"rl.reference.sync_every=2"});
    ASSERT_EQ(follows.size(), 6u);
    for (std::size_t i = 0; i < 6; ++i) {
      // Every second step begins with the reference as its policy.
      if (i % 2 == 0) {
        EXPECT_LT(std::abs(follows[i]), 1e-12) << method << i;
      } else {
        EXPECT_GT(follows[i], 1e-7) << method << i;
      }
    }
    // Up to then it is the model that the run started from.
    EXPECT_NEAR(follows[1], fixed[1], 1e-9 * fixed[1]) << method;
    EXPECT_GT(std::abs(follows[2] - fixed[2]), 1e-6) << method;
    EXPECT_NE(result(std::string("fixed-") + method, method),
              result(std::string("follows-") + method, method));
  }
}

// The KL is reported wherever it is put. In the first step it is rounding alone, of which AdamW
// makes a little where there is no other gradient.
TEST_F(FollowingReference, KlInTheRewardIsReported) {
  const auto kl = [&](const std::string& where) {
    return kls("kl-" + where, "full", {"rl.reference.kl_where=" + where});
  };
  const std::vector<double> in_loss = kl("loss"), in_reward = kl("reward");
  ASSERT_EQ(in_reward.size(), 6u);
  EXPECT_NEAR(in_reward[0], 0, 1e-12);
  EXPECT_GT(in_reward[1], 1e-7);
  EXPECT_NEAR(in_reward[1], in_loss[1], 0.02 * in_loss[1]);
}

// A frozen model beside the policy has no adapters, and no form of experts that lie beside some.
TEST_F(FollowingReference, AFormOfThePolicysExpertsIsNotTheReferences) {
  const auto kls_of = [&](const char* name, Words more) {
    const Words asked = {"train.method=lora", "adapter.modules_to_save=[norm]",
                         "rl.reference.kl_coef=0.1", "train.max_steps=2"};
    more.insert(more.begin(), asked.begin(), asked.end());
    std::vector<double> values;
    for (const train::StepInfo& step : train(run(name, with_experts(more))).steps)
      values.push_back(step.metrics.at("kl_ref"));
    return values;
  };
  const std::vector<double> named = kls_of("named", {"kernels.frozen_experts=as_loaded"});
  ASSERT_EQ(named.size(), 2u);
  EXPECT_EQ(named, kls_of("unnamed", {}));
}

TEST_F(FollowingReference, LeavesThePolicyItsWeights) {
  // One that never comes to follow is the fixed one, bit for bit.
  for (const char* method : {"full", "lora"}) {
    kls(std::string("fixed-") + method, method, {});
    kls(std::string("late-") + method, method, {"rl.reference.sync_every=100"});
    EXPECT_EQ(result(std::string("fixed-") + method, method),
              result(std::string("late-") + method, method))
        << method;
  }
}

TEST_F(FollowingReference, IsThatOfTheCheckpointWhereARunGoesOn) {
  for (const char* method : {"full", "lora"}) {
    const Words words = settings(method, {"rl.reference.sync_every=2"});
    const std::string whole = std::string("whole-") + method,
                      parts = std::string("parts-") + method;
    train(run(whole, words));
    // Stopped between a step that the reference followed and the next one.
    EXPECT_EQ(train(run(parts, words), 3).steps.size(), 3u);
    const auto steps = train(run(parts, words)).steps;
    ASSERT_EQ(steps.size(), 3u);
    EXPECT_GT(steps[0].metrics.at("kl_ref"), 1e-7) << method;
    EXPECT_EQ(result(whole, method), result(parts, method)) << method;
  }
}

TEST_F(FollowingReference, TakesModulesBesideAnAdapter) {
  const auto follows = kls("beside", "lora",
                           {"adapter.modules_to_save=[embed_tokens]", "rl.reference.sync_every=3"});
  ASSERT_EQ(follows.size(), 6u);
  EXPECT_LT(std::abs(follows[0]), 1e-12);
  EXPECT_GT(follows[2], 1e-7);
  EXPECT_LT(std::abs(follows[3]), 1e-12);
}

// A policy that goes on from an adapter is held to that adapter, not to the model below it.
TEST_F(FollowingReference, IsTheAdapterThatTheRunBeganWith) {
  const auto first = run("first", settings("lora", {"train.max_steps=2"}));
  train(first);
  const Words from =
      settings("lora", {"adapter.path=" + (dir_ / "first" / "final").string(), "optim.lr=1e-2"});
  const auto kls_of = [&](const std::string& name, std::int64_t stop_after) {
    config::RunConfig config = run(name, from);
    train::take_adapter_settings(config);
    std::vector<double> values;
    for (const train::StepInfo& step : train(config, stop_after).steps)
      values.push_back(step.metrics.at("kl_ref"));
    return values;
  };
  const std::vector<double> whole = kls_of("whole", 1000);
  ASSERT_EQ(whole.size(), 6u);
  EXPECT_LT(std::abs(whole[0]), 1e-12);
  EXPECT_GT(whole[3], 1e-7);
  // Where a run goes on it is that of the files.
  EXPECT_EQ(kls_of("parts", 3).size(), 3u);
  const std::vector<double> rest = kls_of("parts", 1000);
  ASSERT_EQ(rest.size(), 3u);
  EXPECT_EQ(rest[0], whole[3]);
  EXPECT_EQ(result("whole", "lora"), result("parts", "lora"));
}

class AdaptiveEntropy : public RlTest {
 protected:
  static Words settings(Words more) {
    more.insert(more.begin(), {"optim.lr=1e-2", "train.max_steps=6", "model.dtype=float64"});
    return more;
  }
};

TEST_F(AdaptiveEntropy, CoefficientFollowsTheEntropy) {
  const auto coefficients = [&](const std::string& name, Words more) {
    std::vector<double> values;
    for (const train::StepInfo& step : train(run(name, settings(std::move(more)))).steps)
      values.push_back(step.metrics.at("entropy_coef"));
    return values;
  };
  // A random model's entropy is log 4096 = 8.3.
  const auto low =
      coefficients("low", {"rl.algorithm.entropy_target=9", "rl.algorithm.entropy_coef=0.01",
                           "rl.algorithm.entropy_coef_max=0.022"});
  const std::vector<double> rises = {0.01, 0.015, 0.02, 0.022, 0.022, 0.022};
  for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(low[i], rises[i], 1e-12) << i;
  // Above the target the loss has no bonus.
  const auto high =
      coefficients("high", {"rl.algorithm.entropy_target=1", "rl.algorithm.entropy_coef=0.01"});
  EXPECT_EQ(high, (std::vector<double>{0.01, 0, 0, 0, 0, 0}));
}

TEST_F(AdaptiveEntropy, GoesOnFromACheckpoint) {
  const Words words = settings({"rl.algorithm.entropy_target=9", "rl.algorithm.entropy_coef=0.1",
                                "rl.algorithm.entropy_coef_delta=0.05"});
  train(run("whole", words));
  EXPECT_EQ(train(run("parts", words), 3).steps.size(), 3u);
  const auto steps = train(run("parts", words)).steps;
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_NEAR(steps[0].metrics.at("entropy_coef"), 0.25, 1e-12);
  EXPECT_EQ(weights("whole"), weights("parts"));
}

TEST_F(RlTest, ModelsThatACheckpointLacksAreNamed) {
  const Words words = {"rl.reference.kl_coef=0.1"};
  train(run("parts", words), 3);
  const auto message = [&](Words more) {
    more.insert(more.begin(), words.begin(), words.end());
    return testing::message_of([&] { train(run("parts", more)); });
  };
  EXPECT_THAT(
      message({"rl.reference.sync_every=2"}),
      ::testing::HasSubstr("step 3 has no reference that follows the policy, which this run "
                           "goes on with; set rl.reference.sync_every=0"));
  EXPECT_THAT(message({"rl.algorithm.advantage=gae"}),
              ::testing::HasSubstr("step 3 has no critic, which this run goes on with; set "
                                   "rl.algorithm.advantage=grpo"));
}

TEST_F(AdaptiveEntropy, BoundsHoldItsStart) {
  const auto message = [&](Words words) { return testing::message_of([&] { run("bad", words); }); };
  EXPECT_THAT(message({"rl.algorithm.entropy_target=1", "rl.algorithm.entropy_coef=2"}),
              ::testing::HasSubstr("rl.algorithm.entropy_coef: expected 0 to 1"));
  EXPECT_THAT(message({"rl.algorithm.entropy_target=1", "rl.algorithm.entropy_coef_min=2"}),
              ::testing::HasSubstr("rl.algorithm.entropy_coef_min: 2 is above entropy_coef_max 1"));
}

}  // namespace
}  // namespace heddle
