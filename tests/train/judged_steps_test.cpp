// Answers that are judged during training (eval.*).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "base/errors.h"
#include "train/best_evaluation.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;

TEST(BestEvaluation, LowerLossAndPerplexityAreBetterAndHigherOthers) {
  EXPECT_TRUE(train::is_better("loss", 1, 2));
  EXPECT_TRUE(train::is_better("perplexity", 1, 2));
  EXPECT_TRUE(train::is_better("numeric", 0.5, 0.25));
  EXPECT_FALSE(train::is_better("exact", 0.5, 0.5));
  objective::Evaluation evaluation;
  evaluation.loss = 2, evaluation.metrics.set(metric::kJudged, "exact", 0.75);
  EXPECT_EQ(train::number_of(evaluation, "loss"), 2);
  EXPECT_EQ(train::number_of(evaluation, "exact"), 0.75);
  EXPECT_THAT(testing::message_of([&] { train::number_of(evaluation, "f1"); }),
              HasSubstr("eval.metric is 'f1': the evaluations of this run have loss, exact"));
}

class JudgedRuns : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    std::ofstream rows(dir_ / "rows.jsonl");
    std::ofstream taught(dir_ / "taught.jsonl");
    for (int i = 0; i < 12; ++i) {
      const std::string prompt = "number " + std::to_string(i % 3);
      rows << nlohmann::json{{"prompt", prompt}, {"completion", " yes"}} << "\n";
      taught << nlohmann::json{{"prompt", prompt}, {"completion", " yes"}} << "\n";
    }
  }
  std::vector<std::string> judged(std::vector<std::string> more = {}) const {
    std::vector<std::string> all = {"data.train=" + (dir_ / "taught.jsonl").string(),
                                    "data.eval=" + (dir_ / "taught.jsonl").string(),
                                    "eval.input=" + (dir_ / "rows.jsonl").string(),
                                    "eval.max_new_tokens=6",
                                    "eval.metrics=[contains,perplexity]",
                                    "train.eval_every=10",
                                    "train.max_steps=40",
                                    "data.packing=false",
                                    "optim.lr=5e-3"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  std::vector<nlohmann::json> metrics_of(const std::string& run) const {
    std::istringstream lines(files::read(dir_ / run / "metrics.jsonl"));
    std::vector<nlohmann::json> rows;
    for (std::string line; std::getline(lines, line);) rows.push_back(nlohmann::json::parse(line));
    return rows;
  }
  int sft(const std::string& run, std::vector<std::string> more, std::string* output) const {
    std::vector<std::string> command = {"sft"};
    for (const std::string& argument : arguments(run, judged(std::move(more))))
      command.push_back(argument);
    return run_cli(command, output);
  }
};

TEST_F(JudgedRuns, WriteTheirMetricsAndKeepTheBest) {
  std::string out;
  ASSERT_EQ(sft("run",
                {"eval.metric=contains", "ckpt.keep_best=true", "train.eval_on_start=true",
                 "log.report=true"},
                &out),
            0);
  EXPECT_THAT(out, HasSubstr("best evaluation contains 1.0000"));
  std::vector<double> contains, perplexity;
  for (const nlohmann::json& row : metrics_of("run")) {
    if (!row.contains("eval_loss")) continue;
    contains.push_back(row.at("eval_contains").get<double>());
    perplexity.push_back(row.at("eval_perplexity").get<double>());
    // The rows are those of data.eval.
    EXPECT_NEAR(std::log(perplexity.back()), row.at("eval_loss").get<double>(), 1e-4);
  }
  ASSERT_EQ(contains.size(), 5u);
  EXPECT_EQ(contains.front(), 0);
  EXPECT_EQ(contains.back(), 1);
  EXPECT_LT(perplexity.back(), 0.01 * perplexity.front());
  EXPECT_THAT(files::read(dir_ / "run/report.html"), HasSubstr("eval_contains"));
  // The numbers are those of `heddle eval` of the result.
  std::string judged;
  ASSERT_EQ(run_cli({"eval", (dir_ / "run/final").string(), "--input",
                     (dir_ / "rows.jsonl").string(), "--metric", "perplexity", "--json"},
                    &judged),
            0);
  EXPECT_NEAR(nlohmann::json::parse(judged).at("perplexity").get<double>(), perplexity.back(),
              1e-4);
}

TEST_F(JudgedRuns, ChangeNothingOfTheTraining) {
  ASSERT_EQ(sft("judged", {}, nullptr), 0);
  ASSERT_EQ(sft("plain", {"eval.input=''", "eval.metrics=[]"}, nullptr), 0);
  EXPECT_EQ(weights("judged"), weights("plain"));
}

TEST_F(JudgedRuns, MistakesAreNamedBeforeTheFirstStep) {
  EXPECT_THAT(refusal_of(judged({"eval.metric=exact"})),
              HasSubstr("eval.metric: 'exact': expected loss or one of eval.metrics (contains, "
                        "perplexity)"));
  EXPECT_THAT(refusal_of(judged({"data.eval=[]", "train.eval_every=0"})),
              HasSubstr("eval.input: needs data.eval"));
  EXPECT_THAT(refusal_of(judged({"eval.input=''"})), HasSubstr("eval.metrics: needs eval.input"));
  EXPECT_THAT(refusal_of(judged({"parallel.cp=2"})),
              HasSubstr("eval.input: answers are generated"));
}

class NeftuneRuns : public TrainerTest {};

TEST_F(NeftuneRuns, ChangeTrainingAloneAndContinueBitIdentically) {
  std::ofstream(dir_ / "eval.jsonl") << R"({"text": "row 1 holds 2"})"
                                     << "\n";
  const std::vector<std::string> eval = {"data.eval=" + (dir_ / "eval.jsonl").string()};
  std::vector<double> plain, noisy, parts;
  train_until(config("plain", eval), 1000, &plain);
  auto noise = eval;
  noise.push_back("train.neftune_alpha=5");
  train_until(config("noisy", noise), 1000, &noisy);
  EXPECT_NE(plain, noisy);
  EXPECT_NEAR(plain.front(), noisy.front(), 0.5);
  train_until(config("parts", noise), 5, &parts);
  train_until(config("parts", noise), 1000, &parts);
  EXPECT_EQ(noisy, parts);
  EXPECT_EQ(weights("noisy"), weights("parts"));
}

TEST_F(NeftuneRuns, DependNeitherOnMicroBatchesNorOnRecomputation) {
  const std::vector<std::string> noise = {"train.neftune_alpha=5", "model.dtype=float64",
                                          "data.shuffle=false", "train.max_steps=4"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), noise.begin(), noise.end());
    return more;
  };
  std::vector<double> one, many, full;
  train_until(config("one", with({"train.micro_batch_tokens=256"})), 1000, &one);
  train_until(config("many", with({"train.micro_batch_tokens=64"})), 1000, &many);
  train_until(config("full", with({"train.micro_batch_tokens=256", "train.recompute=full"})), 1000,
              &full);
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_NEAR(one[i], many[i], 1e-9 * one[i]);
    EXPECT_NEAR(one[i], full[i], 1e-9 * one[i]);
  }
}

TEST_F(NeftuneRuns, OfTwoPassesAreRefused) {
  EXPECT_THAT(refusal_of({"train.neftune_alpha=5", "model.head=embed"}),
              HasSubstr("train.neftune_alpha: train.objective contrastive compares two passes"));
}

}  // namespace
}  // namespace heddle
