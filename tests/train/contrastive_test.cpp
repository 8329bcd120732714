#include "train/contrastive.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/rng.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using train::info_nce;
using train::retrieval;

/// Three queries with one, two and no negatives.
const std::vector<std::int64_t> kTexts = {0, 1, 2, 0, 1, 2, 3, 0, 1};

at::Tensor random_rows(std::int64_t rows, std::int64_t width) {
  const CounterRng rng(5, "contrastive");
  at::Tensor result = at::zeros({rows, width}, at::kDouble);
  double* out = result.mutable_data_ptr<double>();
  for (std::int64_t i = 0; i < result.numel(); ++i) out[i] = 2 * rng.uniform(i) - 1;
  return result;
}

/// The formula, number by number.
double loss_of(const at::Tensor& rows, double temperature, bool normalize) {
  const auto dot = [&](std::size_t a, std::size_t b) {
    double product = 0, aa = 0, bb = 0;
    for (std::int64_t h = 0; h < rows.size(1); ++h) {
      const double x = rows[a][h].item<double>(), y = rows[b][h].item<double>();
      product += x * y, aa += x * x, bb += y * y;
    }
    return (normalize ? product / std::sqrt(aa * bb) : product) / temperature;
  };
  double loss = 0;
  for (std::size_t q = 0; q < kTexts.size(); ++q) {
    if (kTexts[q] != 0) continue;
    double sum = 0;
    for (std::size_t d = 0; d < kTexts.size(); ++d) {
      if (kTexts[d] != 0) sum += std::exp(dot(q, d));
    }
    loss += std::log(sum) - dot(q, q + 1);
  }
  return loss;
}

TEST(InfoNce, EqualsTheFormulaAndItsSlope) {
  for (const bool normalize : {true, false}) {
    const double temperature = normalize ? 0.2 : 1.5, scale = 0.25, step = 1e-6;
    const at::Tensor rows = random_rows(9, 5);
    const auto result = info_nce(rows, kTexts, {temperature, normalize}, scale, true);
    EXPECT_NEAR(result.loss_sum.item<double>(), loss_of(rows, temperature, normalize), 1e-10);
    for (std::int64_t i = 0; i < 9; ++i) {
      for (std::int64_t h = 0; h < 5; ++h) {
        at::Tensor more = rows.clone(), less = rows.clone();
        more[i][h] += step, less[i][h] -= step;
        const double slope =
            (loss_of(more, temperature, normalize) - loss_of(less, temperature, normalize)) /
            (2 * step);
        EXPECT_NEAR(result.gradient[i][h].item<double>(), scale * slope, 1e-7);
      }
    }
    EXPECT_FALSE(rows.requires_grad());
    EXPECT_FALSE(info_nce(rows, kTexts, {temperature, normalize}, 1, false).gradient.defined());
  }
}

TEST(Retrieval, RanksTheOwnPositive) {
  // Texts lie on axes; query 0 points at its positive, query 1 at a negative of query 0.
  at::Tensor rows = at::zeros({5, 3}, at::kDouble);
  const std::vector<std::int64_t> texts = {0, 1, 2, 0, 1};
  rows[0][0] = 2, rows[1][0] = 1, rows[2][1] = 1, rows[3][1] = 5, rows[3][2] = 1, rows[4][2] = 1;
  const auto found = retrieval(rows, texts, true);
  EXPECT_DOUBLE_EQ(found.accuracy_at_1, 0.5);
  EXPECT_DOUBLE_EQ(found.mrr_at_10, 0.75);
}

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
  EXPECT_TRUE(kept.steps.back().extra.count("eval_accuracy_at_1"));
  // What was trained is what score gives.
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
