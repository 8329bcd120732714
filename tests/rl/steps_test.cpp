// Whole runs of `heddle rl` with a tiny model of random weights.
#include "rl/steps.h"

#include <gtest/gtest.h>

#include <cmath>

#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using Words = std::vector<std::string>;

class Reports : public train::Observer {
 public:
  Reports(std::int64_t stop_after, std::atomic<bool>& stop)
      : stop_after_(stop_after), stop_(stop) {}
  void on_step(const train::StepInfo& info) override {
    steps.push_back(info);
    if (info.step == stop_after_) stop_ = true;
  }
  void on_evaluation(std::int64_t, const train::Evaluation& evaluation, bool) override {
    evaluations.push_back(evaluation);
  }
  double mean(const char* name, std::size_t first, std::size_t count) const {
    double sum = 0;
    for (std::size_t i = first; i < first + count; ++i) sum += steps.at(i).metrics.at(name);
    return sum / static_cast<double>(count);
  }
  std::vector<train::StepInfo> steps;
  std::vector<train::Evaluation> evaluations;

 private:
  std::int64_t stop_after_;
  std::atomic<bool>& stop_;
};

class RlTest : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    std::ofstream rows(dir_ / "prompts.jsonl");
    for (int i = 0; i < 24; ++i)
      rows << nlohmann::json{{"prompt", "say " + std::to_string(i)}, {"answer", "k"}} << "\n";
  }

  /// Completions that contain a k are right: about a fifth of random ones.
  config::RunConfig run(const std::string& name, Words more = {}) const {
    Words all = {
        "train.objective=policy",         "data.train=" + (dir_ / "prompts.jsonl").string(),
        "train.micro_batch_tokens=256",   "train.max_steps=5",
        "optim.warmup_steps=0",           "optim.schedule=constant",
        "rl.groups_per_step=4",           "rl.samples_per_group=4",
        "rl.reward.verifiers.contains=1", "rollout.max_new_tokens=6",
        "rollout.max_sequences=16"};
    all.insert(all.end(), more.begin(), more.end());
    return config(name, all);
  }
  static Reports train(const config::RunConfig& config, std::int64_t stop_after = 1000) {
    std::atomic<bool> stop = false;
    Reports reports(stop_after, stop);
    train::Trainer trainer(config, reports, stop, nullptr, rl::subject);
    trainer.run();
    return reports;
  }
};

TEST_F(RlTest, RewardClimbsAndNotWithShuffledRewards) {
  const Words settings = {"train.max_steps=60", "optim.lr=1e-2", "rl.groups_per_step=8"};
  const Reports climbs = train(run("climbs", settings));
  const double before = climbs.mean("reward_mean", 0, 3), after = climbs.mean("reward_mean", 55, 5);
  EXPECT_LT(before, 0.6);
  EXPECT_GT(after, before + 0.4);

  Words shuffled = settings;
  shuffled.push_back("rl.reward.shuffle=true");
  const Reports control = train(run("control", shuffled));
  EXPECT_LT(control.mean("reward_mean", 55, 5), control.mean("reward_mean", 0, 3) + 0.3);
}

TEST_F(RlTest, FirstStepIsOnPolicy) {
  const Reports reports = train(run("policy", {"model.dtype=float64", "train.max_steps=2"}));
  const auto& first = reports.steps.front().metrics;
  // The engine's log-probabilities are those of the trainer.
  EXPECT_NEAR(first.at("ratio_mean"), 1, 1e-7);
  EXPECT_NEAR(first.at("kl"), 0, 1e-7);
  EXPECT_GT(first.at("entropy"), 1);
  EXPECT_EQ(first.at("staleness_max"), 0);
  const Reports recomputed =
      train(run("recomputed", {"rl.old_logprobs=recompute", "train.max_steps=1"}));
  EXPECT_EQ(recomputed.steps.front().metrics.at("ratio_mean"), 1);
  EXPECT_EQ(recomputed.steps.front().metrics.at("kl"), 0);
}

TEST_F(RlTest, PolicyIsTrainedAtTheTemperatureThatDrewItsTokens) {
  const auto first = [&](const char* temperature) {
    return train(run(std::string("at-") + temperature,
                     {"model.dtype=float64", "train.max_steps=1", "rl.reference.kl_coef=0.1",
                      std::string("rollout.temperature=") + temperature}))
        .steps.front()
        .metrics;
  };
  const auto cold = first("0.5"), usual = first("1");
  EXPECT_NEAR(cold.at("ratio_mean"), 1, 1e-7);
  EXPECT_NEAR(cold.at("mismatch_abs_max"), 0, 1e-6);
  EXPECT_NEAR(cold.at("kl_ref"), 0, 1e-7);
  // Twice the logits of an almost even distribution: four times as far from the even one's entropy.
  const double even = std::log(4096);
  EXPECT_NEAR((even - cold.at("entropy")) / (even - usual.at("entropy")), 4, 0.5);
}

TEST_F(RlTest, AsyncWithoutStalenessIsSyncBitForBit) {
  train(run("sync"));
  train(run("async", {"rl.mode=async", "rl.max_staleness=0"}));
  EXPECT_EQ(weights("sync"), weights("async"));
  EXPECT_NE(weights("sync"), files::read(dir_ / "model" / "model.safetensors"));
}

TEST_F(RlTest, StalenessIsBounded) {
  for (const char* mode : {"recompute", "wait", "abort"}) {
    const Reports reports =
        train(run(std::string("stale-") + mode,
                  {"rl.mode=async", "rl.max_staleness=2", fmt::format("rl.update_mode={}", mode),
                   "train.max_steps=8", "rollout.max_sequences=5", "rl.old_logprobs=recompute"}));
    double largest = 0;
    for (const train::StepInfo& step : reports.steps)
      largest = std::max(largest, step.metrics.at("staleness_max"));
    EXPECT_LE(largest, 2) << mode;
    if (std::string(mode) != "abort") EXPECT_GT(largest, 0) << mode;
    EXPECT_EQ(reports.steps.size(), 8u) << mode;
  }
}

TEST_F(RlTest, StoppedRunContinuesBitForBit) {
  train(run("whole"));
  train(run("parts"), 3);
  EXPECT_EQ(train(run("parts")).steps.size(), 2u);
  EXPECT_EQ(weights("whole"), weights("parts"));
}

TEST_F(RlTest, MicroBatchesChangeNothing) {
  const auto losses = [&](const char* tokens) {
    std::vector<double> values;
    for (const train::StepInfo& step :
         train(run(std::string("micro-") + tokens,
                   {"model.dtype=float64", "train.max_steps=3",
                    "rl.algorithm.mean=seq_mean_token_mean", "rl.algorithm.loss=gspo",
                    std::string("train.micro_batch_tokens=") + tokens}))
             .steps)
      values.push_back(step.loss);
    return values;
  };
  const std::vector<double> one = losses("1024"), many = losses("64");
  ASSERT_EQ(one.size(), many.size());
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], many[i], 1e-9) << i;
}

TEST_F(RlTest, ReferenceIsTheModelThatTheRunStartsFrom) {
  for (const char* method : {"full", "lora"}) {
    const Reports reports =
        train(run(std::string("reference-") + method,
                  {std::string("train.method=") + method, "adapter.rank=4", "model.dtype=float64",
                   "optim.lr=1e-2", "rl.reference.kl_coef=0.1", "train.max_steps=4"}));
    EXPECT_NEAR(reports.steps.front().metrics.at("kl_ref"), 0, 1e-9) << method;
    EXPECT_GT(reports.steps.back().metrics.at("kl_ref"), 1e-4) << method;
  }
}

TEST_F(RlTest, UniformGroupsAreReplaced) {
  const Reports reports = train(run("dynamic", {"rl.dynamic_sampling=true", "train.max_steps=2"}));
  for (const train::StepInfo& step : reports.steps) {
    const double uniform =
        step.metrics.at("groups_all_right") + step.metrics.at("groups_all_wrong");
    EXPECT_GT(step.metrics.at("rejected_filtered"), 0);
    // After max_attempts a batch takes what there is.
    EXPECT_LE(step.metrics.at("rejected_filtered"), uniform);
    EXPECT_GT(step.metrics.at("reward_std"), 0);
  }
}

TEST_F(RlTest, HeldOutPromptsAreJudged) {
  const Reports reports =
      train(run("eval", {"data.eval=" + (dir_ / "prompts.jsonl").string(), "train.max_steps=2"}));
  ASSERT_EQ(reports.evaluations.size(), 1u);
  EXPECT_EQ(reports.evaluations[0].loss, -reports.evaluations[0].metrics.at("reward"));
  EXPECT_TRUE(fs::exists(dir_ / "eval" / "groups.jsonl"));
}

}  // namespace
}  // namespace heddle
