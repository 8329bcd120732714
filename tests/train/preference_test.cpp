// Preference tuning and pairwise reward models, whole runs.
#include <ATen/ops/allclose.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "assembly/model_on_ranks.h"
#include "data/loader/loader.h"
#include "objective/reference_policy.h"
#include "train/adapter_start.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;
using Words = std::vector<std::string>;

/// Prompts of which the polite answer is to be preferred.
class PreferenceTrainer : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    write_pairs("pairs.jsonl", 0, 96);
    write_pairs("held.jsonl", 96, 112);
  }
  void write_pairs(const std::string& name, int begin, int end) const {
    std::ofstream out(dir_ / name);
    for (int i = begin; i < end; ++i) {
      const std::string prompt =
          "Is " + std::to_string(i) + std::string(static_cast<std::size_t>(i % 5), '?');
      out << nlohmann::json{{"prompt", prompt},
                            {"chosen", " yes please " + std::to_string(i % 7)},
                            {"rejected", " no " + std::to_string(i * 37 % 101)}}
          << "\n";
    }
  }
  Words pairs(const std::string& objective, Words more = {}) const {
    Words all = {"train.objective=" + objective,
                 "data.train=" + (dir_ / "pairs.jsonl").string(),
                 "data.eval=" + (dir_ / "held.jsonl").string(),
                 "data.max_length=48",
                 "train.micro_batch_tokens=1024",
                 "train.global_batch_size=8"};
    if (objective == "reward") {
      all.push_back("model.head=classify");
      all.push_back("model.num_labels=1");
    }
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
};

/// Keeps what a run reports.
class KeepReports : public train::Observer {
 public:
  void on_step(const train::StepInfo& info) override { steps.push_back(info); }
  void on_evaluation(std::int64_t, const train::Evaluation& evaluation, bool) override {
    evaluations.push_back(evaluation);
  }
  std::vector<train::StepInfo> steps;
  std::vector<train::Evaluation> evaluations;
};

KeepReports watch(const config::RunConfig& config) {
  std::atomic<bool> stop = false;
  KeepReports kept;
  train::Trainer trainer(config, kept, stop);
  trainer.run();
  return kept;
}

TEST_F(PreferenceTrainer, DpoLearnsWhatIsPreferred) {
  for (const char* method : {"full", "lora"}) {
    const KeepReports kept =
        watch(config(std::string("dpo-") + method,
                     pairs("dpo", {std::string("train.method=") + method, "adapter.rank=4",
                                   "train.max_steps=24", "optim.lr=3e-3", "dpo.beta=0.5"})));
    // The policy begins as its own reference.
    EXPECT_NEAR(kept.steps.front().loss, std::log(2), 1e-4) << method;
    EXPECT_NEAR(kept.steps.front().metrics.at("reward_margin"), 0, 1e-3) << method;
    EXPECT_LT(kept.steps.front().metrics.at("logps_chosen"), -1) << method;
    EXPECT_GT(kept.steps.back().metrics.at("reward_margin"), 0.5) << method;
    EXPECT_GT(kept.steps.back().metrics.at("reward_accuracy"), 0.9) << method;
    const train::Evaluation& held = kept.evaluations.back();
    EXPECT_LT(held.loss, 0.6) << method;
    EXPECT_GT(held.metrics.at("reward_accuracy"), 0.9) << method;
    EXPECT_NE(kept.steps.back().metrics.find("eval_logps_rejected"), nullptr) << method;
    EXPECT_EQ(kept.steps.back().metrics.find("entropy"), nullptr) << method;
  }
  EXPECT_TRUE(fs::exists(dir_ / "dpo-full" / "reference_logprobs_train.safetensors"));
  EXPECT_FALSE(fs::exists(dir_ / "dpo-lora" / "reference_logprobs_train.safetensors"));
}

// No reference is computed: nothing is written before the first step, and LoRA runs no second pass.
TEST_F(PreferenceTrainer, LossesWithoutAReferenceLearnWhatIsPreferred) {
  for (const char* loss : {"orpo", "simpo"}) {
    for (const char* method : {"full", "lora"}) {
      SCOPED_TRACE(fmt::format("{} {}", loss, method));
      const std::string name = fmt::format("{}-{}", loss, method);
      const KeepReports kept =
          watch(config(name, pairs("dpo", {fmt::format("dpo.loss={}", loss),
                                           fmt::format("train.method={}", method), "adapter.rank=4",
                                           "train.max_steps=24", "optim.lr=3e-3"})));
      EXPECT_LT(kept.steps.back().loss, kept.steps.front().loss);
      EXPECT_GT(kept.steps.back().metrics.at("reward_margin"),
                kept.steps.front().metrics.at("reward_margin") + 0.02);
      EXPECT_GT(kept.steps.back().metrics.at("reward_accuracy"), 0.9);
      // Means over tokens, not sums over answers.
      EXPECT_GT(kept.steps.front().metrics.at("logps_chosen"), -12);
      EXPECT_GT(kept.evaluations.back().metrics.at("reward_accuracy"), 0.9);
      EXPECT_FALSE(fs::exists(dir_ / name / "reference_logprobs_train.safetensors"));
    }
  }
}

TEST_F(PreferenceTrainer, MicroBatchesChangeNothing) {
  for (const auto& [objective, loss] :
       {std::pair("dpo", "sigmoid"), std::pair("dpo", "orpo"), std::pair("dpo", "simpo"),
        std::pair("reward", "sigmoid")}) {
    for (const char* method : {"full", "lora"}) {
      const auto losses = [&, objective = objective, loss = loss](const char* tokens) {
        std::vector<double> values;
        train_until(config(fmt::format("{}-{}-{}-{}", objective, loss, method, tokens),
                           pairs(objective, {"model.dtype=float64", "train.max_steps=4",
                                             fmt::format("dpo.loss={}", loss),
                                             fmt::format("train.method={}", method),
                                             "adapter.rank=4", "dpo.sft_weight=0.3",
                                             fmt::format("train.micro_batch_tokens={}", tokens)})),
                    1000, &values);
        return values;
      };
      const std::vector<double> one = losses("4096"), many = losses("96");
      ASSERT_EQ(one.size(), 4u);
      for (std::size_t i = 0; i < one.size(); ++i)
        EXPECT_NEAR(one[i], many[i], 1e-10) << objective << loss << method << " step " << i;
      EXPECT_NE(one.front(), one.back());
    }
  }
}

// The reference is that of the model alone, whatever the adapter has learned.
TEST_F(PreferenceTrainer, AdaptersAreOffInTheReference) {
  std::atomic<bool> stop = false;
  train::Observer quiet;
  train::Trainer trainer(config("lora", pairs("dpo", {"train.method=lora", "adapter.rank=4",
                                                      "model.dtype=float64", "optim.lr=1e-2"})),
                         quiet, stop);
  trainer.run();
  const train::Setup& trained = trainer.setup();
  const assembly::ModelOnRanks plain = assembly::place(
      assembly::recipe_of_directory(dir_ / "model", "", assembly::Head::kLanguageModel,
                                    assembly::Purpose::kScore),
      trained.placed.context);
  objective::ReferencePolicy beside(trained.placed, {dir_.path(), 512}),
      before(plain, {dir_.path(), 512});
  beside.prepare({trained.train, nullptr});
  before.prepare({trained.train, nullptr});
  const auto batch = data::EvaluationLoader(trained.train, {.micro_batch_tokens = 512}).next();
  for (int i = 0; i < 2; ++i) {
    const at::Tensor off = beside.logprobs(*batch, false);
    const at::Tensor expected = before.logprobs(*batch, false);
    ASSERT_EQ(off.numel(), batch->real_sequences);
    EXPECT_TRUE(at::allclose(off, expected, 0, 1e-9));
  }
}

// A run that goes on from an adapter prefers nothing to it at first: the loss is that of a coin.
TEST_F(PreferenceTrainer, TheReferenceIsTheAdapterThatTheRunBeganWith) {
  const Words lora = {"train.method=lora", "adapter.rank=4", "model.dtype=float64",
                      "optim.lr=1e-2"};
  train_until(config("first", lora), 1000);
  Words from = lora;
  from.push_back("adapter.path=" + (dir_ / "first/final").string());
  const auto go_on = [&](const std::string& run, std::int64_t stop) {
    config::RunConfig read = config(run, pairs("dpo", from));
    train::take_adapter_settings(read);
    std::vector<double> losses;
    train_until(read, stop, &losses);
    return losses;
  };
  const std::vector<double> whole = go_on("whole", 1000);
  EXPECT_NEAR(whole.front(), std::log(2), 1e-9);
  EXPECT_LT(whole.back(), whole.front() - 1e-2);
  go_on("parts", 5);
  go_on("parts", 1000);
  EXPECT_EQ(weights("whole", "final/adapter_model.safetensors"),
            weights("parts", "final/adapter_model.safetensors"));
}

TEST_F(PreferenceTrainer, ResumesBitIdentically) {
  for (const char* method : {"full", "lora"}) {
    const auto settings =
        pairs("dpo", {std::string("train.method=") + method, "adapter.rank=4",
                      "adapter.dropout=0.1", "train.max_steps=6", "train.micro_batch_tokens=200"});
    const std::string whole = std::string("whole-") + method,
                      parts = std::string("parts-") + method;
    train_until(config(whole, settings), 1000);
    train_until(config(parts, settings), 3);
    // The reference is that of the weights before training, also without the file.
    fs::remove(dir_ / parts / "reference_logprobs_train.safetensors");
    train_until(config(parts, settings), 1000);
    const char* const file = std::string(method) == "lora" ? "final/adapter_model.safetensors"
                                                           : "final/model.safetensors";
    EXPECT_EQ(weights(whole, file), weights(parts, file)) << method;
  }
}

TEST_F(PreferenceTrainer, AnotherObjectiveDoesNotContinueACheckpoint) {
  train_until(config("run", pairs("dpo")), 3);
  EXPECT_THAT(testing::message_of([&] { train_until(config("run"), 1000); }),
              HasSubstr("was written with train.objective=dpo, and this run has language_model"));
}

TEST_F(PreferenceTrainer, RewardModelsScoreTexts) {
  const KeepReports kept =
      watch(config("reward", pairs("reward", {"train.max_steps=24", "optim.lr=3e-3"})));
  EXPECT_LT(kept.steps.back().loss, 0.3);
  EXPECT_GT(kept.steps.back().metrics.at("accuracy"), 0.9);
  EXPECT_GT(kept.steps.back().metrics.at("margin"), 1);
  EXPECT_GT(kept.evaluations.back().metrics.at("accuracy"), 0.9);
  std::ofstream(dir_ / "texts.jsonl") << R"({"text": "Is 97?? yes please 6"})"
                                      << "\n"
                                      << R"({"text": "Is 97?? no 54"})"
                                      << "\n";
  ASSERT_EQ(run_cli({"score", (dir_ / "reward/final").string(), "--head", "classify", "--input",
                     (dir_ / "texts.jsonl").string(), "--output", (dir_ / "out.jsonl").string(),
                     "--threads", "1"}),
            0);
  std::vector<double> scores;
  std::ifstream out(dir_ / "out.jsonl");
  for (std::string line; std::getline(out, line);)
    scores.push_back(nlohmann::json::parse(line).at("logits").at(0));
  ASSERT_EQ(scores.size(), 2u);
  EXPECT_GT(scores[0], scores[1]);
}

TEST_F(PreferenceTrainer, RefusesWhatDoesNotFit) {
  EXPECT_THAT(refusal_of(pairs("dpo", {"data.train=" + (dir_ / "train.jsonl").string()})),
              HasSubstr("train.jsonl:1: field 'chosen': is missing"));
  EXPECT_THAT(refusal_of(pairs("dpo", {"model.head=classify", "model.num_labels=1"})),
              HasSubstr("train.objective: dpo needs model.head lm, found classify"));
  EXPECT_THAT(refusal_of(pairs("reward", {"model.num_labels=2"})),
              HasSubstr("model.num_labels: train.objective reward gives a text one score"));
  EXPECT_THAT(refusal_of(pairs("dpo", {"data.loss_on=all"})), HasSubstr("data.loss_on"));
  EXPECT_THAT(refusal_of(pairs("dpo", {"data.format=text"})), HasSubstr("learns from 'pairs'"));
  EXPECT_THAT(refusal_of(pairs("dpo", {"data.truncation=split"})), HasSubstr("data.truncation"));
}

}  // namespace
}  // namespace heddle
