#pragma once

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "rl/steps.h"
#include "train/trainer_fixture.h"

namespace heddle {

using Words = std::vector<std::string>;

/// Observes a run.
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
  /// Twelve episodes of three turns, worth 0.25, 0.25 and 1.
  config::RunConfig episodes(const std::string& name, Words more) const {
    std::ofstream rows(dir_ / "episodes.jsonl");
    for (int i = 0; i < 12; ++i)
      rows << nlohmann::json{{"prompt", "say " + std::to_string(i)}, {"meta", {{"turns", 3}}}}
           << "\n";
    Words all = {
        "train.objective=policy",
        "data.train=" + (dir_ / "episodes.jsonl").string(),
        "data.fields.meta=meta",
        "data.max_length=64",
        "model.dtype=float64",
        "train.micro_batch_tokens=256",
        "optim.warmup_steps=0",
        "rl.groups_per_step=4",
        "rl.samples_per_group=4",
        "rollout.max_new_tokens=32",
        "rollout.max_sequences=16",
        "rl.reward.command=[" + testing::built_path("tests/reward/heddle_reward_worker") + "]"};
    all.insert(all.end(), more.begin(), more.end());
    return config(name, all);
  }
  /// Twelve rows with this meta, whose episodes the program plays.
  config::RunConfig played(const std::string& name, const nlohmann::json& meta,
                           const Words& more = {}) const {
    const std::string file = (dir_ / (name + ".jsonl")).string();
    std::ofstream rows(file);
    for (int i = 0; i < 12; ++i)
      rows << nlohmann::json{{"prompt", "say " + std::to_string(i)}, {"meta", meta}} << "\n";
    rows.close();
    Words all = {
        "data.train=" + file,
        "rl.reward.command=[]",
        "rl.reward.environment=[" + testing::built_path("tests/reward/heddle_reward_worker") + "]",
        "rollout.stop=[e, a]",
        "rl.groups_every=1",
        "train.max_steps=2"};
    all.insert(all.end(), more.begin(), more.end());
    return episodes(name, all);
  }
  /// Overrides for a mixture whose random experts differ: another choice is another distribution.
  Words with_experts(const Words& more) const {
    if (!std::filesystem::exists(dir_ / "moe")) {
      make_model("moe", {{"model_type", "qwen3_5_moe_text"},
                         {"num_experts", 6},
                         {"num_experts_per_tok", 2},
                         {"moe_intermediate_size", 24},
                         {"shared_expert_intermediate_size", 16},
                         {"initializer_range", 0.3}});
    }
    Words all = {"model.path=" + (dir_ / "moe").string(), "model.dtype=float64"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  static Reports train(const config::RunConfig& config, std::int64_t stop_after = 1000) {
    std::atomic<bool> stop = false;
    Reports reports(stop_after, stop);
    train::Trainer trainer(config, reports, stop, nullptr, rl::subject);
    trainer.run();
    return reports;
  }
  /// The losses of a run are those of the same run with steps in smaller micro-batches.
  void expect_no_change_by_micro_batches(const Words& more) const {
    const auto losses = [&](const char* tokens) {
      Words all = more;
      all.push_back(std::string("train.micro_batch_tokens=") + tokens);
      std::vector<double> values;
      for (const train::StepInfo& step : train(run(std::string("micro-") + tokens, all)).steps)
        values.push_back(step.loss);
      return values;
    };
    const std::vector<double> one = losses("1024"), many = losses("64");
    ASSERT_EQ(one.size(), many.size());
    for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], many[i], 1e-9) << i;
  }
};

}  // namespace heddle
