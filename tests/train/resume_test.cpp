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
