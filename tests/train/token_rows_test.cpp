// A model's folder without a tokenizer: rows of token ids train, score and generate; texts are one
// clear error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Words = std::vector<std::string>;

class TokenRows : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    std::filesystem::copy(dir_ / "model", dir_ / "bare");
    for (const auto& file : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"})
      std::filesystem::remove(dir_ / "bare" / file);
    std::ofstream ids(dir_ / "ids.jsonl"), pairs(dir_ / "pairs.jsonl");
    for (int i = 0; i < 60; ++i) {
      const ordered_json row = {7 + i, 8 + i, 9 + i, 10, 11};
      ids << ordered_json{{"input_ids", row}}.dump() << "\n";
      pairs << ordered_json{{"prompt_ids", {5, 6 + i}},
                            {"chosen_ids", {7, 8}},
                            {"rejected_ids", {9}}}
                   .dump()
            << "\n";
    }
  }
  Words with(const std::string& model, const std::string& data, Words more = {}) const {
    more.insert(more.begin(),
                {"model.path=" + (dir_ / model).string(), "data.train=" + (dir_ / data).string()});
    return more;
  }
  int command(const std::string& name, const std::string& run, Words more) const {
    Words all = arguments(run, std::move(more));
    all.insert(all.begin(), name);
    return run_cli(all);
  }
};

TEST_F(TokenRows, TrainToTheBitsThatTheyGiveWithATokenizer) {
  ASSERT_EQ(command("sft", "with", with("model", "ids.jsonl")), 0);
  ASSERT_EQ(command("sft", "without", with("bare", "ids.jsonl")), 0);
  EXPECT_EQ(weights("with"), weights("without"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "without/final/tokenizer.json"));
  // The result is such a folder again; so is the export of a checkpoint.
  EXPECT_EQ(command("pt", "more", with("without/final", "ids.jsonl", {"train.max_steps=4"})), 0);
  EXPECT_EQ(run_cli({"export", (dir_ / "without/checkpoints/step-00000012").string(), "--output",
                     (dir_ / "exported").string()}),
            0);
  EXPECT_EQ(files::read(dir_ / "exported/model.safetensors"), weights("without"));
  ASSERT_EQ(command("dpo", "dpo", with("model", "pairs.jsonl", {"train.micro_batch_tokens=256"})),
            0);
  ASSERT_EQ(
      command("dpo", "dpo-bare", with("bare", "pairs.jsonl", {"train.micro_batch_tokens=256"})), 0);
  EXPECT_EQ(weights("dpo"), weights("dpo-bare"));
}

TEST_F(TokenRows, AreScoredAndContinued) {
  for (const char* model : {"model", "bare"}) {
    ASSERT_EQ(run_cli({"score", (dir_ / model).string(), "--input", (dir_ / "ids.jsonl").string(),
                       "--output", (dir_ / model).string() + ".scored"}),
              0);
    ASSERT_EQ(run_cli({"generate", (dir_ / model).string(), "--input",
                       (dir_ / "ids.jsonl").string(), "--output", (dir_ / model).string() + ".said",
                       "--max-new-tokens", "4", "--temperature", "0", "--ignore-eos"}),
              0);
  }
  EXPECT_EQ(files::read(dir_ / "model.scored"), files::read(dir_ / "bare.scored"));
  std::ifstream with(dir_ / "model.said"), without(dir_ / "bare.said");
  std::string a, b;
  while (std::getline(with, a) && std::getline(without, b)) {
    const ordered_json said = ordered_json::parse(a), said_bare = ordered_json::parse(b);
    EXPECT_EQ(said["output_ids"], said_bare["output_ids"]);
    EXPECT_FALSE(said_bare.contains("text"));
  }
}

TEST_F(TokenRows, TextsNeedATokenizer) {
  std::ofstream(dir_ / "mixed.jsonl") << R"({"input_ids": [1, 2, 3]})"
                                      << "\n"
                                      << R"({"text": "a"})"
                                      << "\n";
  EXPECT_THAT(refusal_of(with("bare", "mixed.jsonl")),
              AllOf(HasSubstr("mixed.jsonl:2: "), HasSubstr("bare has no tokenizer.json"),
                    HasSubstr("rows must be token ids"), HasSubstr("model.tokenizer")));
  std::ofstream(dir_ / "chat.jsonl") << R"({"messages": [{"role": "user", "content": "a"}]})"
                                     << "\n";
  EXPECT_THAT(refusal_of(with("bare", "chat.jsonl")),
              AllOf(HasSubstr("chat.jsonl:1: "), HasSubstr("bare has no tokenizer.json")));
  std::ofstream(dir_ / "beyond.jsonl") << R"({"input_ids": [1, 999999]})"
                                       << "\n";
  EXPECT_THAT(refusal_of(with("bare", "beyond.jsonl")),
              HasSubstr("beyond.jsonl:1: field 'input_ids': 999999 is beyond the model's"));
  EXPECT_THAT(refusal_of(with("bare", "ids.jsonl", {"log.sample_prompts=[a]"})),
              AllOf(HasSubstr("log.sample_prompts"), HasSubstr("no tokenizer.json")));
  EXPECT_EQ(run_cli({"generate", (dir_ / "bare").string(), "--prompt", "a"}), 2);
  // No fault of a row: none is left out for it.
  EXPECT_THAT(refusal_of(with("bare", "mixed.jsonl", {"data.on_bad_line=skip"})),
              AllOf(HasSubstr("mixed.jsonl:2: "), HasSubstr("bare has no tokenizer.json")));
  // Another folder is named for its tokenizer, which has to be there.
  EXPECT_THAT(refusal_of({"data.train=" + (dir_ / "ids.jsonl").string(),
                          "model.tokenizer=" + (dir_ / "bare").string()}),
              HasSubstr("bare: has no tokenizer.json"));
}

}  // namespace
}  // namespace heddle
