// Whole runs of `heddle rl` with a critic.
#include "rl/critic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "ckpt/training_checkpoint.h"
#include "rl/rl_fixture.h"

namespace heddle {
namespace {

class CriticTest : public RlTest {
 protected:
  config::RunConfig run(const std::string& name, Words more) const {
    more.insert(more.begin(), "rl.algorithm.advantage=gae");
    return RlTest::run(name, more);
  }
  std::vector<double> losses(const config::RunConfig& config) const {
    std::vector<double> values;
    for (const train::StepInfo& step : train(config).steps) {
      values.push_back(step.loss);
      values.push_back(step.metrics.at("value_loss"));
    }
    return values;
  }
};

TEST_F(CriticTest, LearnsWhatRewardsAreToBeExpected) {
  // The policy stands still; prompts tell what a completion will be worth.
  std::ofstream rows(dir_ / "prompts.jsonl");
  for (int i = 0; i < 24; ++i) {
    rows << nlohmann::json{{"prompt", (i % 2 == 0 ? "yes " : "no ") + std::to_string(i)},
                           {"answer", i % 2 == 0 ? "e" : "zzzzzzzzzz"}}
         << "\n";
  }
  rows.close();
  for (const char* method : {"full", "lora"}) {
    const Reports reports = train(run(std::string("learns-") + method,
                                      {std::string("train.method=") + method, "adapter.rank=4",
                                       "optim.lr=0", "train.max_steps=60", "rl.groups_per_step=8",
                                       "rl.critic.lr=3e-3", "rollout.max_new_tokens=4"}));
    EXPECT_LT(reports.mean("value_loss", 50, 10), 0.5 * reports.mean("value_loss", 0, 2)) << method;
    EXPECT_GT(reports.mean("explained_variance", 50, 10), 0.5) << method;
    EXPECT_LT(reports.mean("explained_variance", 0, 1), 0.1) << method;
    EXPECT_GT(reports.mean("critic_grad_norm", 0, 60), 0) << method;
  }
}

TEST_F(CriticTest, RewardClimbs) {
  const Reports climbs = train(
      run("climbs", {"train.max_steps=60", "optim.lr=1e-2", "rl.groups_per_step=8",
                     "rl.critic.lr=3e-3", "rl.samples_per_group=1", "rl.groups_per_step=32"}));
  EXPECT_GT(climbs.mean("reward_mean", 55, 5), climbs.mean("reward_mean", 0, 3) + 0.4);
}

TEST_F(CriticTest, LearnsAloneInItsFirstSteps) {
  const Reports reports =
      train(run("warm", {"rl.critic.warmup_steps=3", "ckpt.every=1", "ckpt.keep_last=9"}));
  for (std::size_t i = 0; i < reports.steps.size(); ++i)
    EXPECT_EQ(reports.steps[i].lr, i < 3 ? 0 : 1e-3) << i;
  const auto tensor = [&](int step, const std::string& name) {
    return ckpt::TrainingCheckpoint::open(
               dir_ / "warm" / "checkpoints" / fmt::format("step-{:08}", step),
               ckpt::TrainingCheckpoint::Verify::kSizes)
        .whole(name);
  };
  const std::string norm = "weights/model.norm.weight";
  EXPECT_TRUE(tensor(1, norm).equal(tensor(3, norm)));
  EXPECT_FALSE(tensor(3, norm).equal(tensor(4, norm)));
  for (const char* name : {"critic/weights/model.norm.weight", "critic/weights/score.weight"})
    EXPECT_FALSE(tensor(1, name).equal(tensor(3, name))) << name;
}

TEST_F(CriticTest, StoppedRunContinuesBitForBit) {
  const Words settings = {"rl.critic.lr=3e-3", "rl.critic.schedule=cosine",
                          "rl.critic.lr_warmup_steps=2", "rl.algorithm.lambda=0.9"};
  train(run("whole", settings));
  train(run("parts", settings), 3);
  EXPECT_EQ(train(run("parts", settings)).steps.size(), 2u);
  EXPECT_EQ(weights("whole"), weights("parts"));
  // The critic matters: with another learning rate the policy is another one.
  train(run("slow", {"rl.critic.lr=1e-4", "rl.algorithm.lambda=0.9"}));
  EXPECT_NE(weights("whole"), weights("slow"));
}

TEST_F(CriticTest, MicroBatchesChangeNothing) {
  const Words settings = {"model.dtype=float64", "train.max_steps=3", "rl.critic.lr=3e-3"};
  const auto of = [&](const std::string& tokens) {
    Words more = settings;
    more.push_back("train.micro_batch_tokens=" + tokens);
    return losses(run("micro-" + tokens, more));
  };
  const std::vector<double> one = of("1024"), many = of("64");
  ASSERT_EQ(one.size(), many.size());
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], many[i], 1e-9) << i;
}

TEST_F(CriticTest, ValuesAreHeldBackOverSeveralUpdates) {
  const auto clipped = [&](const std::string& updates) {
    const Reports reports =
        train(run("updates-" + updates, {"rl.critic.updates=" + updates, "rl.critic.clip=0.01",
                                         "rl.critic.lr=1e-2", "train.max_steps=3"}));
    return reports.mean("value_clipped", 0, 3);
  };
  EXPECT_EQ(clipped("1"), 0);
  EXPECT_GT(clipped("4"), 0.1);
}

TEST_F(CriticTest, AStepWithoutATokenToLearnFromHasNoFiguresOfTheOneBefore) {
  const Reports reports = train(
      run("masked", {"rl.overlong=mask", "rollout.max_new_tokens=2", "rollout.stop=[e]",
                     "rl.groups_per_step=1", "rl.samples_per_group=1", "train.max_steps=12"}));
  int learned = 0, masked = 0;
  for (const train::StepInfo& step : reports.steps) {
    const bool has_tokens = step.loss_tokens > 0;
    ++(has_tokens ? learned : masked);
    EXPECT_EQ(step.metrics.find("value_loss") != nullptr, has_tokens) << step.step;
    EXPECT_EQ(step.metrics.find("explained_variance") != nullptr, has_tokens) << step.step;
  }
  EXPECT_GT(learned, 0);
  EXPECT_GT(masked, 0);
}

TEST_F(CriticTest, GoesWithEpisodesAndAdapters) {
  // The critic has no language-model head, whether or not the policy trains its own.
  make_model("untied", {{"tie_word_embeddings", false}});
  const Reports reports = train(episodes(
      "episodes", {"rl.algorithm.advantage=gae", "train.max_steps=3", "train.method=lora",
                   "adapter.rank=4", "rollout.stop=[e, a]", "adapter.modules_to_save=[lm_head]",
                   "model.path=" + (dir_ / "untied").string()}));
  for (const train::StepInfo& step : reports.steps) EXPECT_GT(step.metrics.at("value_loss"), 0);
}

TEST_F(CriticTest, SettingsThatDoNotFitAreNamed) {
  const auto message = [&](Words more) {
    return testing::message_of([&] { run("refused", std::move(more)); });
  };
  EXPECT_THAT(message({"rl.critic.schedule=wsd"}),
              ::testing::HasSubstr("rl.critic.schedule: wsd needs optim.decay_steps >= 1"));
  EXPECT_THAT(message({"rl.critic.warmup_steps=5"}),
              ::testing::HasSubstr("5 leaves the policy none of train.max_steps 5"));
}

}  // namespace
}  // namespace heddle
