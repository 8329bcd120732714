// Files of the model's folder that change while a run trains, or between two starts of it.
#include "train/sources.h"

#include <gmock/gmock.h>

#include <functional>

#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kFine = "(no error)";

/// Does something after a step.
class After : public train::Observer {
 public:
  After(std::int64_t step, std::function<void()> act) : step_(step), act_(std::move(act)) {}
  void on_step(const train::StepInfo& info) override {
    if (info.step == step_) act_();
  }

 private:
  std::int64_t step_;
  std::function<void()> act_;
};

class SourcesTest : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    files::write_atomically(dir_ / "model/generation_config.json", R"({"top_k": 20})");
    files::write_atomically(dir_ / "model/README.md", "the base model");
    fs::copy(dir_ / "model", dir_ / "kept");
  }
  void restore() const {
    fs::remove_all(dir_ / "model");
    fs::copy(dir_ / "kept", dir_ / "model");
  }
  void write(const std::string& name, const std::string& text) const {
    files::write_atomically(dir_ / "model" / name, text);
  }
  /// One more or another byte, in the file itself.
  void touch(const std::string& name) const {
    std::ofstream(dir_ / "model" / name, std::ios::app) << "\n";
  }

  /// Message of a run whose sources change after its second step; kFine if it ends well.
  std::string train_while(const std::function<void()>& change,
                          std::vector<std::string> more = {}) const {
    more.push_back("train.max_steps=3");
    fs::remove_all(dir_ / "run");
    restore();
    std::atomic<bool> stop = false;
    After observer(2, change);
    const std::string message = testing::message_of([&] {
      train::Trainer trainer(config("run", more), observer, stop);
      trainer.run();
    });
    EXPECT_EQ(fs::exists(dir_ / "run/final"), message == kFine);
    return message;
  }

  /// Message of a stopped run that is started again after the change; kFine if it goes on.
  std::string resume_after(const std::function<void()>& change,
                           const std::vector<std::string>& more = {}) const {
    fs::remove_all(dir_ / "run");
    restore();
    train_until(config("run", more), 2);
    change();
    return testing::message_of([&] { train_until(config("run", more), 1000); });
  }
};

TEST_F(SourcesTest, AFileThatChangesDuringTrainingIsNamedBeforeFinalIsWritten) {
  EXPECT_EQ(train_while([] {}), kFine);
  const auto changed = [](const std::string& name) {
    return HasSubstr("model/" + name + " was changed while it was in use");
  };
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                           "generation_config.json"}) {
    EXPECT_THAT(train_while([&] { touch(name); }), changed(name)) << name;
  }
  EXPECT_THAT(train_while([&] { write("chat_template.jinja", "{{ 'x' }}"); },
                          {"train.method=lora", "adapter.rank=2"}),
              changed("chat_template.jinja"));
  EXPECT_THAT(train_while([&] { fs::resize_file(dir_ / "model/tokenizer.json", 100); }),
              changed("tokenizer.json"));
  // The run's result stays within reach: what was trained is in its checkpoint.
  restore();
  train_until(config("run", {"train.max_steps=3"}), 1000);
  EXPECT_EQ(files::read(dir_ / "run/final/tokenizer.json"),
            files::read(dir_ / "kept/tokenizer.json"));
}

TEST_F(SourcesTest, AResumedRunRefusesOtherSources) {
  EXPECT_EQ(resume_after([] {}), kFine);
  const auto other = [](const std::string& name) {
    return AllOf(HasSubstr("step-00000002: the run began with other contents of " + name),
                 HasSubstr("put back"));
  };
  EXPECT_THAT(resume_after([&] { touch("tokenizer.json"); }), other("tokenizer.json"));
  EXPECT_THAT(resume_after([&] { touch("chat_template.jinja"); }), other("chat_template.jinja"));
  EXPECT_THAT(resume_after([&] { touch("tokenizer_config.json"); }),
              other("tokenizer_config.json"));
  EXPECT_THAT(resume_after([&] { write("special_tokens_map.json", "{}"); }),
              other("special_tokens_map.json"));
  EXPECT_THAT(resume_after([&] {
                auto config =
                    nlohmann::ordered_json::parse(files::read(dir_ / "model/config.json"));
                config["transformers_version"] = "9.9";
                write("config.json", config.dump());
              }),
              other("config.json of the model"));
  const auto other_weights = [&] {
    std::string bytes = files::read(dir_ / "kept/model.safetensors");
    for (std::size_t i = bytes.size() - 4; i > bytes.size() / 2; i -= 4) bytes[i] ^= 1;
    write("model.safetensors", bytes);
  };
  EXPECT_THAT(resume_after(other_weights, {"train.method=lora", "adapter.rank=2"}),
              other("the set of weights"));
  // Neither times nor places count, nor what only goes along.
  EXPECT_EQ(resume_after([&] { restore(); }), kFine);
  EXPECT_EQ(resume_after([&] { write("README.md", "the base model, explained"); }), kFine);
  EXPECT_EQ(files::read(dir_ / "run/final/generation_config.json"), R"({"top_k": 20})");
}

TEST_F(SourcesTest, ACheckpointIsExportedWithItsOwnBaseAlone) {
  train_until(config("run"), 2);
  const std::string checkpoint = (dir_ / "run/checkpoints/step-00000002").string();
  const auto status = [&](const std::string& output) {
    return run_cli({"export", checkpoint, "--base", (dir_ / "kept").string(), "--output",
                    (dir_ / output).string()});
  };
  EXPECT_EQ(status("same"), 0);
  std::ofstream(dir_ / "kept/tokenizer.json", std::ios::app) << " ";
  EXPECT_EQ(status("other"), 2);
  EXPECT_FALSE(fs::exists(dir_ / "other"));
}

TEST(Sources, WhatNoRunWroteIsNoCrash) {
  const nlohmann::ordered_json now = {{"trained", {{"a", "1"}}}, {"carried", {{"b", "2"}}}};
  const auto message = [&](const nlohmann::ordered_json& state) {
    return testing::message_of([&] { train::require_same_sources(state, now, "step"); });
  };
  EXPECT_EQ(message({{"step", 1}}), kFine);  // of an older version
  EXPECT_EQ(message({{"sources", now}}), kFine);
  EXPECT_EQ(message({{"sources", {{"trained", {{"a", "1"}}}}}}), kFine);
  for (const nlohmann::ordered_json& sources :
       {nlohmann::ordered_json(7), nlohmann::ordered_json("a"), nlohmann::ordered_json::array({1}),
        nlohmann::ordered_json{{"trained", 3}}, nlohmann::ordered_json{{"trained", {{"a", 1}}}}}) {
    EXPECT_THAT(message({{"sources", sources}}), HasSubstr("other contents of a")) << sources;
  }
  EXPECT_THAT(message({{"sources", {{"trained", {{"a", "1"}, {"\x1b[2J", "3"}}}}}}),
              HasSubstr("other contents of \\x1b[2J"));
}

}  // namespace
}  // namespace heddle
