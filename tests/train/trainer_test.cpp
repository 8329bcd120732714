#include "train/trainer.h"

#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <fstream>
#include <map>
#include <random>
#include <thread>

#include "base/errors.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/model_directory.h"
#include "ckpt/tensor_io.h"
#include "comm/listener.h"
#include "comm/world.h"
#include "testing/message_of.h"
#include "testing/process.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

TEST_F(TrainerTest, AStoppedRunContinuesBitIdentically) {
  std::vector<double> whole, parts;
  train_until(config("whole"), 1000, &whole);
  EXPECT_TRUE(train_until(config("parts"), 5, &parts).stopped);
  EXPECT_FALSE(fs::exists(dir_ / "parts/final"));
  EXPECT_FALSE(train_until(config("parts"), 1000, &parts).stopped);
  EXPECT_EQ(whole.size(), 12u);
  EXPECT_EQ(whole, parts);
  EXPECT_EQ(weights("whole"), weights("parts"));
  EXPECT_LT(whole.back(), whole.front());
}

TEST_F(TrainerTest, ALoraRunWithDropoutContinuesBitIdentically) {
  const std::vector<std::string> lora = {"train.method=lora", "adapter.rank=4",
                                         "adapter.dropout=0.1", "model.dtype=bfloat16"};
  train_until(config("whole", lora), 1000);
  train_until(config("parts", lora), 7);
  train_until(config("parts", lora), 1000);
  EXPECT_EQ(weights("whole", "final/adapter_model.safetensors"),
            weights("parts", "final/adapter_model.safetensors"));
}

TEST_F(TrainerTest, AccumulationDoesNotChangeTheLoss) {
  std::vector<double> one, many;
  train_until(config("one", {"model.dtype=float64", "train.micro_batch_tokens=256"}), 1000, &one);
  train_until(config("many", {"model.dtype=float64", "train.micro_batch_tokens=64"}), 1000, &many);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], many[i], 1e-9 * one[i]);
}

class FrozenTest : public TrainerTest {
 protected:
  /// A classifier whose new head is not trained.
  std::vector<std::string> classifier(std::vector<std::string> more = {}) const {
    std::ofstream rows(dir_ / "labelled.jsonl");
    for (int i = 0; i < 40; ++i)
      rows << nlohmann::json{{"text", "number " + std::to_string(i)}, {"label", i % 3}} << "\n";
    more.insert(more.end(),
                {"data.train=" + (dir_ / "labelled.jsonl").string(), "model.head=classify",
                 "model.num_labels=3", "train.freeze=[score.weight]"});
    return more;
  }
  at::Tensor exported(const std::string& run, const std::string& name) const {
    return ckpt::read_tensor(ckpt::ModelDirectory::open(dir_ / run / "final").at(name));
  }
  /// `heddle export` of the run's checkpoint of that step writes what final/ holds.
  void expect_same_export(const std::string& run, const std::string& step, const char* file) const {
    const fs::path to = dir_ / (run + " exported");
    ASSERT_EQ(
        run_cli({"export", (dir_ / run / "checkpoints" / step).string(), "--output", to.string()}),
        0);
    EXPECT_EQ(files::read(to / file), files::read(dir_ / run / "final" / file));
  }
};

TEST_F(FrozenTest, ANewHeadIsInTheCheckpoints) {
  train_until(config("run", classifier()), 5);
  const auto checkpoint = ckpt::TrainingCheckpoint::open(dir_ / "run/checkpoints/step-00000005");
  ASSERT_TRUE(checkpoint.has("weights/score.weight"));
  EXPECT_FALSE(checkpoint.has("exp_avg/score.weight"));
  train_until(config("run", classifier()), 1000);
  EXPECT_TRUE(at::equal(exported("run", "score.weight"), checkpoint.whole("weights/score.weight")));
  expect_same_export("run", "step-00000012", "model.safetensors");
}

TEST_F(FrozenTest, ANewHeadIsSavedWithAnAdapter) {
  train_until(config("run", classifier({"train.method=lora", "adapter.rank=2"})), 1000);
  const auto adapter = ckpt::AdapterDirectory::open(dir_ / "run/final");
  ASSERT_EQ(adapter.saved().size(), 1u);
  EXPECT_EQ(adapter.saved()[0].name, "score.weight");
  expect_same_export("run", "step-00000012", "adapter_model.safetensors");
}

TEST_F(FrozenTest, WhatWasTrainedBeforeKeepsItsValues) {
  const std::string embedding = "model.embed_tokens.weight";
  train_until(config("run", {"train.max_steps=6"}), 1000);
  const at::Tensor trained = exported("run", embedding);
  const at::Tensor norm = exported("run", "model.norm.weight");
  // The checkpoints of the frozen run hold them as well.
  for (const char* steps : {"train.max_steps=9", "train.max_steps=12"}) {
    train_until(config("run", {steps, "train.freeze=['*embed_tokens*']"}), 1000);
    EXPECT_TRUE(at::equal(exported("run", embedding), trained)) << steps;
  }
  EXPECT_FALSE(at::equal(exported("run", "model.norm.weight"), norm));
  expect_same_export("run", "step-00000012", "model.safetensors");
}

TEST_F(TrainerTest, EarlyStopAndBestCheckpoint) {
  std::ofstream(dir_ / "eval.jsonl") << R"({"text": "row 1 holds 2"})"
                                     << "\n";
  const auto summary = train_until(
      config("run", {"data.eval=" + (dir_ / "eval.jsonl").string(), "train.eval_every=2",
                     "optim.lr=1e-30", "train.early_stop_patience=2", "ckpt.keep_best=true"}),
      1000);
  // The loss cannot fall at this learning rate: the first evaluation is the best, two more end the
  // run.
  EXPECT_TRUE(summary.stopped_early);
  EXPECT_EQ(summary.steps, 6);
  EXPECT_TRUE(fs::exists(dir_ / "run/checkpoints/step-00000002"));
  EXPECT_TRUE(fs::exists(dir_ / "run/final/model.safetensors"));
}

TEST_F(TrainerTest, ModulesToSaveThatAreNotThereAreNamed) {
  const auto message_of = [&](const char* modules) {
    return testing::message_of([&] {
      train_until(
          config("run", {"train.method=lora", std::string("adapter.modules_to_save=") + modules}),
          1000);
    });
  };
  EXPECT_THAT(message_of("[nonsense]"),
              ::testing::HasSubstr("adapter.modules_to_save: 'nonsense' matches no module"));
  EXPECT_THAT(message_of("[embed_tokens, embed_token]"),
              ::testing::HasSubstr("did you mean 'embed_tokens'?"));
  EXPECT_THAT(message_of("[lm_head]"),
              ::testing::AllOf(::testing::HasSubstr("tied to its embedding"),
                               ::testing::HasSubstr("write embed_tokens")));
  EXPECT_THAT(message_of("[layers.0.mlp.up_proj]"),
              ::testing::HasSubstr("'layers.0.mlp.up_proj' names model.layers.0.mlp.up_proj, which "
                                   "has an adapter"));
  make_model("untied", {{"tie_word_embeddings", false}});
  train_until(config("untied-run", {"model.path=" + (dir_ / "untied").string(), "train.method=lora",
                                    "train.max_steps=3", "adapter.modules_to_save=[lm_head]"}),
              1000);
}

TEST_F(TrainerTest, EvaluationOnStartIsAStepZero) {
  std::ofstream(dir_ / "eval.jsonl") << R"({"text": "row 1 holds 2"})"
                                     << "\n";
  std::vector<std::string> command = {"pt"};
  for (const std::string& argument :
       arguments("run", {"data.eval=" + (dir_ / "eval.jsonl").string(), "train.eval_on_start=true",
                         "log.report=true", "train.max_steps=3"}))
    command.push_back(argument);
  ASSERT_EQ(run_cli(command), 0);
  std::ifstream metrics(dir_ / "run/metrics.jsonl");
  std::string line;
  std::vector<nlohmann::json> rows;
  while (std::getline(metrics, line)) rows.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[0].at("step"), 0);
  EXPECT_TRUE(rows[0].at("loss").is_null());
  EXPECT_GT(rows[0].at("eval_loss").get<double>(), rows[3].at("eval_loss").get<double>());
  const std::string report = files::read(dir_ / "run/report.html");
  EXPECT_EQ(report.find(">nan"), std::string::npos);
  // A run that goes on does not evaluate the start again.
  command.push_back("train.max_steps=5");
  ASSERT_EQ(run_cli(command), 0);
  std::ifstream again(dir_ / "run/metrics.jsonl");
  int zeros = 0, count = 0;
  while (std::getline(again, line)) {
    zeros += nlohmann::json::parse(line).at("step") == 0;
    ++count;
  }
  EXPECT_EQ(zeros, 1);
  EXPECT_EQ(count, 6);
}

TEST_F(TrainerTest, TheCommandsWorkTogether) {
  std::string out;
  std::vector<std::string> sft = {"pt"};
  for (const std::string& argument : arguments("run")) sft.push_back(argument);
  ASSERT_EQ(run_cli(sft, &out), 0);
  EXPECT_THAT(out, ::testing::HasSubstr("12 steps in"));
  EXPECT_TRUE(fs::exists(dir_ / "run/config.resolved.yaml"));
  std::ifstream metrics(dir_ / "run/metrics.jsonl");
  std::string line;
  int rows = 0;
  while (std::getline(metrics, line)) {
    const auto row = nlohmann::json::parse(line);
    EXPECT_EQ(row.at("step"), ++rows);
    for (const char* key : {"loss", "lr", "grad_norm", "tokens", "tokens_per_s"})
      EXPECT_TRUE(row.contains(key)) << key;
  }
  EXPECT_EQ(rows, 12);
  const std::string model = (dir_ / "run/final").string();
  EXPECT_EQ(run_cli({"score", model, "--input", (dir_ / "train.jsonl").string(), "--output",
                     (dir_ / "scored").string()}),
            0);
  ASSERT_EQ(
      run_cli({"generate", model, "--prompt", "row 7", "--raw", "--max-new-tokens", "5"}, &out), 0);
  EXPECT_EQ(run_cli({"tokenize", "model.path=" + model, "--text", "row 7 holds"}), 0);
  EXPECT_EQ(run_cli({"generate", model}), 2);
  std::string rounded;
  ASSERT_EQ(run_cli({"generate", model, "--prompt", "row 7", "--raw", "--max-new-tokens", "5",
                     "--seed", "1", "rollout.state_dtype=bfloat16", "rollout.kv_page=8"},
                    &rounded),
            0);
  EXPECT_FALSE(rounded.empty());
}

TEST_F(TrainerTest, ACheckpointIsExportedAsTheFinalResult) {
  make_model("experts", {{"model_type", "qwen3_5_moe_text"},
                         {"num_experts", 4},
                         {"num_experts_per_tok", 2},
                         {"moe_intermediate_size", 16},
                         {"shared_expert_intermediate_size", 16}});
  const std::vector<std::string> common = {"train.max_steps=4", "ckpt.every=2",
                                           "model.dtype=bfloat16"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), common.begin(), common.end());
    return more;
  };
  const std::string experts = "model.path=" + (dir_ / "experts").string();
  const auto export_of = [&](const std::string& run, const std::string& step, const fs::path& to) {
    return run_cli(
        {"export", (dir_ / run / "checkpoints" / step).string(), "--output", to.string()});
  };
  const auto files_of = [](const fs::path& directory) {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(directory))
      files[entry.path().filename()] = files::read(entry.path());
    return files;
  };
  const std::vector<std::pair<std::string, std::vector<std::string>>> runs = {
      {"full", with({"train.freeze=['*embed_tokens*']", "model.added_tokens=['<new>']"})},
      {"moe", with({experts})},
      {"lora", with({"train.method=lora", "adapter.rank=4",
                     "adapter.modules_to_save=[embed_tokens]", "model.added_tokens=['<new>']"})},
      {"experts", with({experts, "train.method=lora", "adapter.rank=4",
                        "adapter.target_parameters=['mlp.experts.gate_up_proj']"})},
      {"shared", with({experts, "train.method=lora", "adapter.rank=4",
                       "adapter.target_parameters=['*.mlp.experts.*']",
                       "adapter.shared_expert_factors=true"})}};
  for (const auto& [name, settings] : runs) {
    SCOPED_TRACE(name);
    const std::string run = "run of " + name;
    train_until(config(run, settings), 1000);
    ASSERT_EQ(export_of(run, "step-00000004", dir_ / name / "4"), 0);
    ASSERT_EQ(export_of(run, "step-00000002", dir_ / name / "2"), 0);
    EXPECT_EQ(files_of(dir_ / name / "4"), files_of(dir_ / run / "final"));
    EXPECT_NE(files_of(dir_ / name / "2"), files_of(dir_ / run / "final"));
  }
  // A result is not replaced unasked.
  EXPECT_EQ(export_of("run of full", "step-00000002", dir_ / "full/4"), 2);
}

TEST_F(TrainerTest, ACheckpointWhoseModelHasMovedIsExportedWithBase) {
  train_until(config("run", {"train.max_steps=3"}), 1000);
  fs::rename(dir_ / "model", dir_ / "moved");
  std::vector<std::string> command = {"export", (dir_ / "run/checkpoints/step-00000003").string(),
                                      "--output", (dir_ / "out").string()};
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_cli(command), 2);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), ::testing::HasSubstr("--base DIR"));
  command.insert(command.end(), {"--base", (dir_ / "moved").string()});
  EXPECT_EQ(run_cli(command), 0);
  EXPECT_EQ(weights("out", "model.safetensors"), weights("run"));
}

TEST_F(TrainerTest, ACheckpointGivenAsAModelIsRecognised) {
  train_until(config("run", {"train.max_steps=3"}), 1000);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(
      run_cli({"generate", (dir_ / "run/checkpoints/step-00000003").string(), "--prompt", "row 7"}),
      2);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::HasSubstr("a training checkpoint, not a model: make one of it with "
                                   "`heddle export "));
}

TEST_F(TrainerTest, DropoutChangesWhatIsLearned) {
  const auto losses_of = [&](const std::string& run, const std::string& dropout) {
    std::vector<double> losses;
    train_until(config(run, {"train.method=lora", "adapter.rank=4", "train.max_steps=4",
                             "optim.warmup_steps=0", "adapter.dropout=" + dropout}),
                4, &losses);
    return losses;
  };
  const std::vector<double> with = losses_of("with", "0.5"), without = losses_of("without", "0");
  ASSERT_EQ(with.size(), 4u);
  EXPECT_EQ(with[0], without[0]);  // B is zero
  EXPECT_NE(with[3], without[3]);
}

TEST_F(TrainerTest, EightBitMomentsTrainAndContinue) {
  make_model("blocks", {{"hidden_size", 256}});
  std::vector<double> wide, coded, continued;
  const auto with = [&](const std::string& run, const std::string& state) {
    return config(run, {"model.path=" + (dir_ / "blocks").string(), "optim.state_dtype=" + state,
                        "model.dtype=bfloat16"});
  };
  train_until(with("wide", "float32"), 12, &wide);
  train_until(with("coded", "int8"), 12, &coded);
  train_until(with("cut", "int8"), 6, &continued);
  train_until(with("cut", "int8"), 12, &continued);
  EXPECT_EQ(coded, continued);
  EXPECT_EQ(weights("coded"), weights("cut"));
  ASSERT_EQ(coded.size(), wide.size());
  EXPECT_LT(wide.back(), wide.front() - 1);
  EXPECT_NEAR(coded.back(), wide.back(), 0.05);
}

TEST_F(TrainerTest, SamplesAreAnsweredWithoutDropout) {
  std::vector<std::string> sft = {"pt"};
  for (const std::string& argument :
       arguments("run", {"train.method=lora", "adapter.dropout=0.5", "log.sample_prompts=[row 7]",
                         "log.sample_tokens=6", "log.report=true"}))
    sft.push_back(argument);
  ASSERT_EQ(run_cli(sft), 0);
  const auto report = nlohmann::json::parse(files::read(dir_ / "run/report.json"));
  const std::string after = report.at("samples").at(0).at("after");
  std::string generated;
  ASSERT_EQ(
      run_cli({"generate", (dir_ / "model").string(), "--adapter", (dir_ / "run/final").string(),
               "--prompt", "row 7", "--max-new-tokens", "6", "--temperature", "0"},
              &generated),
      0);
  EXPECT_FALSE(after.empty());
  EXPECT_THAT(generated, ::testing::HasSubstr(after));
}

/// Starts the program itself, so that it can be killed.
pid_t start(const std::vector<std::string>& arguments) {
  return testing::start_heddle(arguments, "/dev/null", "/dev/null");
}

void kill_and_resume(const std::vector<std::string>& arguments, int kills, unsigned seed) {
  std::mt19937 random(seed);
  int killed = 0;
  while (killed < kills) {
    const pid_t child = start(arguments);
    // From the loading of the program to the writing of the last file.
    std::this_thread::sleep_for(
        std::chrono::milliseconds(std::uniform_int_distribution<int>(150, 1300)(random)));
    kill(child, SIGKILL);
    ++killed;
    ASSERT_EQ(testing::wait_for(child), 128 + SIGKILL)
        << "the run ended before it was killed " << kills << " times";
  }
  ASSERT_EQ(testing::wait_for(start(arguments)), 0);
}

class FaultTrainerTest : public TrainerTest {};

TEST_F(FaultTrainerTest, KilledAtTwentyRandomMomentsEndsBitIdentically) {
  const auto with = [&](const char* run) {
    std::vector<std::string> all = {"pt"};
    for (std::string& argument : arguments(run, {"train.max_steps=2500", "ckpt.every=7"}))
      all.push_back(argument);
    return all;
  };
  ASSERT_EQ(testing::wait_for(start(with("whole"))), 0);
  kill_and_resume(with("killed"), 20, 17);
  EXPECT_EQ(weights("whole"), weights("killed"));
  for (const auto& entry : fs::directory_iterator(dir_ / "killed/checkpoints")) {
    EXPECT_EQ(entry.path().filename().string().find(".tmp"), std::string::npos) << entry.path();
  }
}

/// Fails with the first step.
class FailingObserver : public train::Observer {
 public:
  void on_step(const train::StepInfo&) override { throw DataError("no more rows"); }
};

TEST_F(TrainerTest, TheOtherRanksHearOfAFailureBeforeTheTrainerIsDestroyed) {
  comm::Listener listener(std::uint16_t{0});
  comm::LaunchEnvironment alone;
  alone.master = listener.local_endpoint();
  alone.announces_job = true;
  const auto world = comm::World::serve(alone, std::move(listener), comm::Seconds(30));
  FailingObserver observer;
  const std::atomic<bool> stop = false;
  train::Trainer trainer(config("run"), observer, stop, world);
  EXPECT_THROW(trainer.run(), DataError);
  EXPECT_EQ(world->store().find(comm::kFailureKey), "0 no more rows");
}

TEST_F(TrainerTest, EvaluationDataWithoutALossTokenAreNamedBeforeTheFirstStep) {
  files::write_atomically(dir_ / "eval.jsonl",
                          R"({"messages": [{"role": "user", "content": "hello"}]})"
                          "\n");
  FailingObserver observer;
  const std::atomic<bool> stop = false;
  EXPECT_THAT(
      [&] {
        train::Trainer(config("run", {"data.eval=" + (dir_ / "eval.jsonl").string()}), observer,
                       stop);
      },
      ::testing::ThrowsMessage<DataError>(
          ::testing::AllOf(::testing::HasSubstr("data.eval: "), ::testing::HasSubstr("eval.jsonl"),
                           ::testing::HasSubstr("no token of the data set carries loss"))));
}

TEST_F(TrainerTest, SigintSavesAndExitsWithZero) {
  std::vector<std::string> all = {"pt"};
  for (std::string& argument : arguments("run", {"train.max_steps=100000", "ckpt.every=0"}))
    all.push_back(argument);
  const pid_t child = start(all);
  EXPECT_TRUE(testing::has_made(child, dir_ / "run/metrics.jsonl"));
  kill(child, SIGINT);
  EXPECT_EQ(testing::wait_for(child), 0);
  EXPECT_FALSE(fs::is_empty(dir_ / "run/checkpoints"));
}

}  // namespace
}  // namespace heddle
