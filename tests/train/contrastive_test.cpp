#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "train/trainer_fixture.h"

namespace heddle {
namespace {

/// Queries and documents that share a rare word; which word belongs to which is learned from
/// other pairs of the same words.
class EmbeddingTrainer : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    write_pairs("pairs.jsonl", 0, 160);
    write_pairs("held.jsonl", 160, 192);
  }
  void write_pairs(const std::string& name, int begin, int end) const {
    static const char* const kThings[] = {"cat",    "river", "stone", "bread", "window",
                                          "garden", "king",  "train", "paper", "winter"};
    std::ofstream out(dir_ / name);
    for (int i = begin; i < end; ++i) {
      const std::string thing = kThings[i % 10], number = std::to_string(i * 37 % 101);
      out << nlohmann::json{{"query", "Where is the " + thing + " " + number + "?"},
                            {"positive", number + ": here stands a " + thing + "."},
                            {"negatives", {number + ": here stands nothing."}}}
          << "\n";
    }
  }
  std::vector<std::string> embed(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"model.head=embed", "data.train=" + (dir_ / "pairs.jsonl").string(),
                               "train.global_batch_size=16", "train.micro_batch_tokens=4096",
                               "train.max_steps=40", "optim.lr=5e-3"});
    return more;
  }
};

/// Keeps what evaluations said.
class KeepEvaluations : public train::Observer {
 public:
  void on_evaluation(std::int64_t step, const train::Evaluation& evaluation, bool) override {
    evaluations[step] = evaluation;
  }
  void on_step(const train::StepInfo& info) override { steps.push_back(info); }
  std::map<std::int64_t, train::Evaluation> evaluations;
  std::vector<train::StepInfo> steps;
};

KeepEvaluations watch(const config::RunConfig& config) {
  std::atomic<bool> stop = false;
  KeepEvaluations kept;
  train::Trainer trainer(config, kept, stop);
  trainer.run();
  return kept;
}

TEST_F(EmbeddingTrainer, RetrievalImproves) {
  const auto kept = watch(config(
      "run", embed({"data.eval=" + (dir_ / "held.jsonl").string(), "train.eval_on_start=true"})));
  ASSERT_EQ(kept.evaluations.size(), 2u);
  const train::Evaluation &before = kept.evaluations.at(0), &after = kept.evaluations.at(40);
  EXPECT_LT(after.loss, 0.5 * before.loss);
  EXPECT_GT(after.metrics.at("mrr_at_10"), before.metrics.at("mrr_at_10") + 0.2);
  EXPECT_GT(after.metrics.at("accuracy_at_1"), before.metrics.at("accuracy_at_1") + 0.2);
  EXPECT_NE(kept.steps.back().metrics.find("eval_accuracy_at_1"), nullptr);
  // The trained model is the one that score reads.
  ASSERT_EQ(run_cli({"score", (dir_ / "run/final").string(), "--head", "embed", "--input",
                     (dir_ / "train.jsonl").string(), "--output", (dir_ / "out.jsonl").string(),
                     "--threads", "1"}),
            0);
}

TEST_F(EmbeddingTrainer, MicroBatchesChangeNothing) {
  for (const char* method : {"full", "lora"}) {
    const std::vector<std::string> common = {"model.dtype=float64", "train.max_steps=5",
                                             std::string("train.method=") + method,
                                             "data.max_length=48", "adapter.rank=4"};
    std::vector<double> one, many;
    auto with = [&](const char* tokens) {
      std::vector<std::string> more = common;
      more.push_back(std::string("train.micro_batch_tokens=") + tokens);
      return embed(more);
    };
    train_until(config(std::string("one-") + method, with("8192")), 1000, &one);
    train_until(config(std::string("many-") + method, with("150")), 1000, &many);
    ASSERT_EQ(one.size(), 5u);
    for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], many[i], 1e-9 * one[i]) << i;
    EXPECT_NE(one.front(), one.back());
  }
}

TEST_F(EmbeddingTrainer, DropoutIsTheSameInBothPassesAndResumesBitIdentically) {
  const auto lora =
      embed({"train.method=lora", "adapter.dropout=0.2", "adapter.rank=4",
             "train.micro_batch_tokens=300", "data.max_length=64", "train.max_steps=6"});
  train_until(config("whole", lora), 1000);
  train_until(config("parts", lora), 3);
  train_until(config("parts", lora), 1000);
  EXPECT_EQ(weights("whole", "final/adapter_model.safetensors"),
            weights("parts", "final/adapter_model.safetensors"));
}

TEST_F(EmbeddingTrainer, RowsWithoutPairsAreNamed) {
  try {
    train_until(config("run", embed({"data.train=" + (dir_ / "train.jsonl").string()})), 1000);
    FAIL();
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("train.jsonl:1: field 'query': is missing"));
  }
}

}  // namespace
}  // namespace heddle
