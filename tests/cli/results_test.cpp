// Where the results of commands go, and which defaults of the model they take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "program.h"

namespace heddle::cli {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;

/// A folder with one row of token ids.
class Results : public ::testing::Test {
 protected:
  void SetUp() override { f_.write("ids.jsonl", "{\"input_ids\":[100,2000,37,999]}\n"); }

  Outcome score(Arguments more) const {
    Arguments arguments = {"score", f_.at("model"), "--input", f_.at("ids.jsonl"), "--threads",
                           "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_command(arguments);
  }
  ordered_json generated(Arguments more = {}) const {
    Arguments arguments = {
        "generate",         f_.at("model"), "--input", f_.at("ids.jsonl"), "--output",
        f_.at("out.jsonl"), "--threads",    "1",       "--max-new-tokens", "6"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome outcome = run_command(arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    said_ = outcome.err;
    return ordered_json::parse(files::read(f_.at("out.jsonl")));
  }

  Folder f_;
  mutable std::string said_;
};

TEST_F(Results, RowsOnTheStandardOutputStandThereAlone) {
  const pid_t process = start(f_, {"score", f_.at("model"), "--input", f_.at("ids.jsonl"),
                                   "--output", "-", "--threads", "1"});
  EXPECT_EQ(wait_for(process), 0);
  EXPECT_TRUE(ordered_json::parse(files::read(f_.at("stdout"))).contains("logprobs"));
  EXPECT_THAT(message(f_), HasSubstr("1 rows, 4 tokens"));
}

TEST_F(Results, GoThroughALink) {
  fs::create_directory(f_.at("elsewhere"));
  fs::create_symlink("elsewhere/scored.jsonl", f_.at("link.jsonl"));
  EXPECT_EQ(score({"--output", f_.at("link.jsonl")}).status, 0);
  EXPECT_TRUE(fs::is_symlink(f_.at("link.jsonl")));
  EXPECT_TRUE(fs::exists(f_.at("elsewhere/scored.jsonl")));
  fs::create_directory(f_.at("disk"));
  fs::create_symlink("disk", f_.at("exported"));
  EXPECT_EQ(run_command({"export", f_.at("model"), "--output", f_.at("exported")}).status, 0);
  EXPECT_TRUE(fs::is_symlink(f_.at("exported")));
  EXPECT_TRUE(fs::exists(f_.at("disk/model.safetensors")));
}

TEST_F(Results, ScoreSaysWhatItCounted) {
  f_.write("ids.jsonl",
           "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},"
           "{\"role\":\"assistant\",\"content\":\"yes\"}]}\n");
  const Outcome outcome = score({"--output", f_.at("out.jsonl"), "--answers", "--json"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto summary = ordered_json::parse(outcome.out);
  EXPECT_EQ(summary["scored_tokens"], summary["tokens"].get<int>() - 1);
  EXPECT_GT(summary["answer_tokens"].get<int>(), 0);
  EXPECT_LT(summary["answer_tokens"].get<int>(), summary["scored_tokens"].get<int>());
  EXPECT_NE(summary["answer_nll"], summary["mean_nll"]);
}

// PEFT keeps neither the number of a head's classes nor their names.
TEST_F(Results, AnAdapterOfAClassifierIsUsedAsOne) {
  std::string rows;
  for (int i = 0; i < 24; ++i) {
    rows += ordered_json{{"text", "row " + std::to_string(i)},
                         {"label", std::array{"low", "middle", "high"}[i % 3]}}
                .dump() +
            "\n";
  }
  f_.write("classes.jsonl", rows);
  Arguments training = f_.train({"model.head=classify", "train.method=lora", "adapter.rank=4"});
  training.front() = "sft";
  training.push_back("data.train=" + f_.at("classes.jsonl"));
  const Outcome trained = run_command(training);
  ASSERT_EQ(trained.status, 0) << trained.err;
  const std::string adapter = f_.at("run/final"), copy = f_.at("copy"), merged = f_.at("merged");

  const auto logits = [&](Arguments more) {
    more.insert(more.end(), {"--input", f_.at("classes.jsonl"), "--output", f_.at("out.jsonl"),
                             "--threads", "1"});
    more.insert(more.begin(), "score");
    const Outcome outcome = run_command(more);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const std::string text = files::read(f_.at("out.jsonl"));
    const auto row = ordered_json::parse(text.substr(0, text.find('\n')));
    const auto found = row.at("logits").get<std::vector<double>>();
    EXPECT_EQ(found.size(), 3u);
    const auto best = std::max_element(found.begin(), found.end()) - found.begin();
    EXPECT_EQ(row.at("predicted_label"), (std::array{"high", "low", "middle"}[best]));
    return found;
  };
  const auto expected = logits({f_.at("model"), "--adapter", adapter});
  const Outcome judged = run_command({"eval", f_.at("model"), "--adapter", adapter, "--input",
                                      f_.at("classes.jsonl"), "--threads", "1"});
  EXPECT_EQ(judged.status, 0) << judged.err;
  EXPECT_THAT(judged.out, HasSubstr("f1_macro"));
  ASSERT_EQ(run_command({"export", adapter, "--output", copy}).status, 0);
  EXPECT_EQ(logits({f_.at("model"), "--adapter", copy}), expected);
  ASSERT_EQ(
      run_command({"export", f_.at("model"), "--adapter", adapter, "--output", merged}).status, 0);
  const auto whole = logits({merged});
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(whole[i], expected[i], 1e-5);

  const Outcome generated = run_command(
      {"generate", f_.at("model"), "--adapter", adapter, "--prompt", "hi", "--threads", "1"});
  EXPECT_EQ(generated.status, 2);
  EXPECT_THAT(generated.err, HasSubstr("run/final is a classifier: it has no language-model head"));
  f_.write("run/final/id2label.json", R"({"id2label": {"0": "low", "1": "high"}})");
  const Outcome fewer = score({"--adapter", adapter, "--output", f_.at("out.jsonl")});
  EXPECT_EQ(fewer.status, 2);
  EXPECT_THAT(fewer.err, HasSubstr("id2label.json: names 2 classes, the head has 3"));
}

TEST_F(Results, GenerationEndsAtTheTokensOfConfigJson) {
  fs::remove(f_.at("model/generation_config.json"));
  const Arguments greedy = {"--temperature", "0"};
  const auto whole = generated({"--temperature", "0", "--ignore-eos"})["output_ids"];
  ASSERT_EQ(whole.size(), 6u);
  auto config = ordered_json::parse(files::read(f_.at("model/config.json")));
  config["eos_token_id"] = {whole[2], 4079};
  f_.write("model/config.json", config.dump());
  const auto row = generated(greedy);
  EXPECT_EQ(row["finish_reason"], "stop");
  EXPECT_LE(row["output_ids"].size(), 3u);
  EXPECT_EQ(row["output_ids"].back(), whole[2]);
}

TEST_F(Results, SamplingTakesTheDefaultsOfTheModel) {
  const auto greedy = generated({"--temperature", "0", "--ignore-eos"})["output_ids"];
  EXPECT_NE(generated({"--ignore-eos"})["output_ids"], greedy);
  f_.write("model/generation_config.json",
           R"({"do_sample": true, "top_k": 1, "temperature": 0.5, "typical_p": 0.9})");
  EXPECT_EQ(generated({"--ignore-eos"})["output_ids"], greedy);
  EXPECT_THAT(said_, HasSubstr("sampling: temperature 0.5, top_k 1 (generation_config.json)"));
  EXPECT_THAT(said_, HasSubstr("not used: typical_p 0.9"));
  EXPECT_NE(generated({"--ignore-eos", "--top-k", "0", "--temperature", "1"})["output_ids"],
            greedy);
  f_.write("model/generation_config.json", R"({"do_sample": false})");
  EXPECT_EQ(generated({"--ignore-eos"})["output_ids"], greedy);
}

TEST_F(Results, RunsWithoutAConfigurationFileHaveFoldersOfTheirOwn) {
  const auto folder = [](Arguments more) {
    more.insert(more.begin(),
                {"config", "--print", "model.path=models/base", "data.train=a.jsonl"});
    const std::string text = run_command(more).out;
    const std::size_t at = text.find("output_dir: ");
    return text.substr(at, text.find('\n', at) - at);
  };
  EXPECT_THAT(folder({}), HasSubstr("runs/base-"));
  EXPECT_NE(folder({"optim.lr=1e-3"}), folder({"optim.lr=2e-3"}));
  EXPECT_EQ(folder({"optim.lr=1e-3", "train.max_steps=5"}),
            folder({"train.max_steps=9", "device=cpu", "optim.lr=1e-3"}));
  EXPECT_THAT(folder({"train.output_dir=runs/trial #2"}), HasSubstr("runs/trial #2"));
}

}  // namespace
}  // namespace heddle::cli
