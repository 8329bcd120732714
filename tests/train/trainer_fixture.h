#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "base/files.h"
#include "cli/application.h"
#include "config/config.h"
#include "testing/device.h"
#include "testing/message_of.h"
#include "testing/paths.h"
#include "testing/small_config.h"
#include "testing/temporary_directory.h"
#include "train/trainer.h"

namespace heddle {

namespace fs = std::filesystem;

inline const fs::path kTokenizer = testing::source_path("examples/tokenizer-4k");

inline int run_cli(const std::vector<std::string>& arguments, std::string* output = nullptr) {
  std::ostringstream out;
  const int status = cli::run(arguments, {out});
  if (output != nullptr) *output = out.str();
  return status;
}

/// Asks for a stop after a step.
class StopAfter : public train::Observer {
 public:
  StopAfter(std::int64_t step, std::atomic<bool>& stop) : step_(step), stop_(stop) {}
  void on_step(const train::StepInfo& info) override {
    losses.push_back(info.loss);
    if (info.step == step_) stop_ = true;
  }
  std::vector<double> losses;

 private:
  std::int64_t step_;
  std::atomic<bool>& stop_;
};

inline train::Summary train_until(const config::RunConfig& config, std::int64_t step,
                                  std::vector<double>* losses = nullptr) {
  std::atomic<bool> stop = false;
  StopAfter observer(step, stop);
  train::Trainer trainer(config, observer, stop);
  const train::Summary summary = trainer.run();
  if (losses != nullptr)
    losses->insert(losses->end(), observer.losses.begin(), observer.losses.end());
  return summary;
}

/// A folder with a small model and a few hundred rows; runs on the device of --device.
class TrainerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    make_model("model", nlohmann::ordered_json::object());
    std::ofstream data(dir_ / "train.jsonl");
    for (int i = 0; i < 300; ++i) {
      data << nlohmann::json{{"text", "row " + std::to_string(i * 7919 % 1000) + " holds " +
                                          std::to_string(i)}}
           << "\n";
    }
  }

  /// A model directory with random weights; `more` adds to its configuration.
  void make_model(const std::string& name, const nlohmann::ordered_json& more) const {
    nlohmann::ordered_json config = testing::small_config();
    config.update(more);
    files::write_atomically(dir_ / "config.json", config.dump());
    ASSERT_EQ(run_cli({"init", "--config", (dir_ / "config.json").string(), "--tokenizer",
                       kTokenizer.string(), "--output", (dir_ / name).string(), "--seed", "3"}),
              0);
  }

  std::vector<std::string> arguments(const std::string& run,
                                     std::vector<std::string> more = {}) const {
    std::vector<std::string> all = {"model.path=" + (dir_ / "model").string(),
                                    "data.train=" + (dir_ / "train.jsonl").string(),
                                    "data.max_length=64",
                                    "train.global_batch_size=4",
                                    "train.micro_batch_tokens=128",
                                    "train.max_steps=12",
                                    "optim.lr=1e-3",
                                    "optim.warmup_steps=3",
                                    "ckpt.every=3",
                                    "log.report=false",
                                    "log.tensorboard=false",
                                    "device.name=" + testing::device().str(),
                                    "device.threads=1",
                                    "train.output_dir=" + (dir_ / run).string()};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  config::RunConfig config(const std::string& run, std::vector<std::string> more = {}) const {
    return config::load("", arguments(run, std::move(more)));
  }
  std::string weights(const std::string& run, const char* file = "final/model.safetensors") const {
    return files::read(dir_ / run / file);
  }

  /// The refusal of a run with these settings.
  std::string refusal_of(const std::vector<std::string>& more) const {
    return testing::message_of([&] { train_until(config("refused", more), 1000); });
  }

  testing::TemporaryDirectory dir_;
};

}  // namespace heddle
