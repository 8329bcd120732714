// Runs that go on from a checkpoint, and those that may not.
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "testing/message_of.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

TEST_F(TrainerTest, NeverResumingRefusesAnOldRun) {
  train_until(config("run"), 5);
  EXPECT_THROW(train_until(config("run", {"train.resume=never"}), 1000), ConfigError);
}

TEST_F(TrainerTest, AnotherDtypeThanTheCheckpointsIsNamed) {
  train_until(config("run", {"model.dtype=float32"}), 5);
  try {
    train_until(config("run", {"model.dtype=bfloat16"}), 1000);
    ADD_FAILURE() << "it went on";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("set model.dtype=float32 to continue it"));
  }
}

TEST_F(TrainerTest, AFinishedRunSaysSoAndAContinuedOneCountsItsOwnSteps) {
  const auto run = [&](const std::string& steps, std::string* out) {
    std::vector<std::string> command = {"pt"};
    for (const std::string& argument : arguments("run", {"train.max_steps=" + steps}))
      command.push_back(argument);
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(run_cli(command, out), 0);
    return ::testing::internal::GetCapturedStderr();
  };
  std::string first, again, more;
  run("4", &first);
  EXPECT_THAT(first, ::testing::StartsWith("4 steps in "));
  const std::string model = weights("run"), metrics = files::read(dir_ / "run/metrics.jsonl");
  EXPECT_THAT(run("4", &again), ::testing::Not(::testing::HasSubstr("parameters")));
  EXPECT_THAT(again, ::testing::StartsWith("already finished after step 4 (train.max_steps 4)"));
  EXPECT_THAT(again, ::testing::HasSubstr("for more raise train.max_steps\n"));
  EXPECT_EQ(weights("run"), model);
  EXPECT_EQ(files::read(dir_ / "run/metrics.jsonl"), metrics);
  EXPECT_THAT(run("6", &more), ::testing::HasSubstr("continuing after step 4 from "));
  EXPECT_THAT(more, ::testing::StartsWith("2 steps after the 4 before in "));
  // Killed after the last checkpoint, it still owes its result.
  fs::remove_all(dir_ / "run/final");
  run("6", &again);
  EXPECT_THAT(again, ::testing::StartsWith("0 steps after the 6 before in "));
  EXPECT_TRUE(fs::exists(dir_ / "run/final/model.safetensors"));
}

TEST_F(TrainerTest, AnEarlyStopIsAnEndAsWell) {
  std::ofstream(dir_ / "eval.jsonl") << R"({"text": "row 1 holds 2"})"
                                     << "\n";
  const config::RunConfig stops_early =
      config("run", {"data.eval=" + (dir_ / "eval.jsonl").string(), "train.eval_every=2",
                     "optim.lr=1e-30", "train.early_stop_patience=1"});
  EXPECT_EQ(train_until(stops_early, 1000).steps, 4);
  EXPECT_EQ(train_until(stops_early, 1000).steps, 4);
  // Killed before its result was written, it owes that and no further step.
  const std::string result = weights("run");
  fs::remove_all(dir_ / "run/final");
  EXPECT_EQ(train_until(stops_early, 1000).steps, 4);
  EXPECT_EQ(weights("run"), result);
}

TEST_F(TrainerTest, StepsOfAnotherSizeEndWhereTheRowsDo) {
  const auto run = [&](const std::string& name, const char* size, std::int64_t stop) {
    std::vector<std::string> words = {"train.epochs=1", "optim.schedule=cosine",
                                      std::string("train.global_batch_size=") + size};
    words.insert(words.begin(), "data.packing=false");
    config::RunConfig read = config(name, words);
    read.train.max_steps = 0;
    return train_until(read, stop).steps;
  };
  // 300 rows: 4 x 6 of them, then 46 x 6.
  EXPECT_EQ(run("small", "6", 4), 4);
  EXPECT_EQ(run("small", "12", 1000), 4 + 23);
  EXPECT_EQ(run("large", "12", 4), 4);
  EXPECT_EQ(run("large", "6", 1000), 4 + 42);
}

TEST_F(TrainerTest, AnotherOptimizerThanTheCheckpointsIsNamed) {
  train_until(config("run", {"train.freeze=['*layers.0.*']"}), 3);
  const auto refusal = [&](std::vector<std::string> more, bool is_frozen = true) {
    if (is_frozen) more.insert(more.begin(), "train.freeze=['*layers.0.*']");
    return testing::message_of([&] { train_until(config("run", more), 1000); });
  };
  EXPECT_THAT(refusal({"optim.name=sgd"}),
              ::testing::HasSubstr("written with optim.name=adamw, and this run has sgd"));
  EXPECT_THAT(refusal({"optim.name=muon"}), ::testing::HasSubstr("set optim.name=adamw"));
  EXPECT_THAT(refusal({"optim.state_dtype=int8"}),
              ::testing::HasSubstr("written with optim.state_dtype=float32"));
  EXPECT_THAT(refusal({}, /*is_frozen=*/false),
              ::testing::HasSubstr("set train.freeze, adapter.targets"));
}

TEST_F(TrainerTest, TheBestOfAnotherMetricIsNotTheBest) {
  std::ofstream rows(dir_ / "classes.jsonl");
  for (int i = 0; i < 60; ++i)
    rows << nlohmann::json{{"text", "row " + std::to_string(i)}, {"label", i % 2 ? "a" : "b"}}
         << "\n";
  rows.close();
  const std::string data = (dir_ / "classes.jsonl").string();
  const auto run = [&](const char* metric, const char* steps) {
    std::vector<std::string> command = {"sft"};
    for (const std::string& argument :
         arguments("run", {"data.train=" + data, "data.eval=" + data, "model.head=classify",
                           "train.eval_every=1", "ckpt.keep_best=true", "ckpt.keep_last=1",
                           std::string("eval.metric=") + metric, "optim.schedule=constant",
                           std::string("train.max_steps=") + steps, "optim.warmup_steps=0"}))
      command.push_back(argument);
    EXPECT_EQ(run_cli(command), 0);
  };
  run("accuracy", "2");
  run("loss", "6");
  double least = 1e9;
  std::int64_t best = 0;
  for (std::istringstream lines(files::read(dir_ / "run/metrics.jsonl")); !lines.eof();) {
    std::string line;
    std::getline(lines, line);
    if (line.empty()) continue;
    const auto row = nlohmann::json::parse(line);
    if (row.at("step") <= 2 || !row.contains("eval_loss") || row["eval_loss"] >= least) continue;
    least = row["eval_loss"];
    best = row["step"];
  }
  ASSERT_GT(best, 2);
  EXPECT_TRUE(fs::exists(dir_ / fmt::format("run/checkpoints/step-{:08}", best))) << best;
}

TEST_F(TrainerTest, TheCheckpointOfAnotherMethodIsNamed) {
  train_until(config("run"), 3);
  try {
    train_until(config("run", {"train.method=lora"}), 1000);
    ADD_FAILURE() << "it went on";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("was written with train.method=full"));
  }
}

TEST_F(TrainerTest, ACheckpointOfOtherAdaptersIsNotCut) {
  const auto adapted = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"train.method=lora", "adapter.rank=8"});
    return config("run", more);
  };
  train_until(adapted({}), 3);
  const auto refusal = [&](std::vector<std::string> more) {
    return testing::message_of([&] { train_until(adapted(std::move(more)), 1000); });
  };
  for (const char* rank : {"4", "16"}) {
    EXPECT_THAT(refusal({std::string("adapter.rank=") + rank}),
                ::testing::ContainsRegex("step-00000003: tensor '.*lora_A.*' is .8, "));
  }
  EXPECT_THAT(refusal({"adapter.targets=[q_proj]"}),
              ::testing::AllOf(::testing::HasSubstr("the checkpoint of step 3 holds what "),
                               ::testing::HasSubstr("the first is 'model.layers.0.")));
  // A module that is saved whole stays as it was learned; what is frozen since, too.
  const std::int64_t last = config("run").train.max_steps;
  EXPECT_EQ(train_until(adapted({"adapter.modules_to_save=[]"}), 1000).steps, last);
}

TEST_F(TrainerTest, ResumingFromTheFolderOfARunNamesItsNewestCheckpoint) {
  train_until(config("run"), 4);
  try {
    train_until(config("other", {"train.resume=" + (dir_ / "run").string()}), 1000);
    ADD_FAILURE() << "it went on";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("run/checkpoints/step-00000004"));
  }
  EXPECT_FALSE(fs::exists(dir_ / "other"));
}

}  // namespace
}  // namespace heddle
