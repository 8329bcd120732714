#include "train/vocabulary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "data/tokenizer/tokenizer.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;

class VocabularyTest : public TrainerTest {
 protected:
  /// More tokens than the model's 4096 rows have room for.
  static std::string many_tokens() {
    std::string list;
    for (int i = 0; i < 30; ++i)
      list += (i == 0 ? "'<|new-" : ", '<|new-") + std::to_string(i) + "|>'";
    return "model.added_tokens=[" + list + "]";
  }
  std::vector<std::string> with_tokens(std::vector<std::string> more = {}) const {
    std::ofstream(dir_ / "marked.jsonl") << R"({"text": "row <|new-0|> holds <|new-29|>"})"
                                         << "\n"
                                         << R"({"text": "<|new-7|> row"})"
                                         << "\n";
    more.push_back(many_tokens());
    more.push_back("data.train=" + (dir_ / "marked.jsonl").string());
    return more;
  }
};

TEST_F(VocabularyTest, NewTokensAreTrainedExportedAndResumed) {
  train_until(config("whole", with_tokens()), 1000);
  train_until(config("parts", with_tokens()), 5);
  train_until(config("parts", with_tokens()), 1000);
  EXPECT_EQ(weights("whole"), weights("parts"));
  const auto tokenizer = data::Tokenizer::load(dir_ / "whole/final");
  const auto before = data::Tokenizer::load(dir_ / "model");
  EXPECT_EQ(tokenizer->vocab_size(), before->vocab_size() + 30);
  EXPECT_EQ(tokenizer->id_of("<|new-29|>"), tokenizer->vocab_size() - 1);
  const auto exported = nlohmann::json::parse(files::read(dir_ / "whole/final/config.json"));
  EXPECT_EQ(exported.at("vocab_size"), tokenizer->vocab_size());
  // The result is a model like any other: it goes on, and the tokens are known by now.
  train_until(config("again", with_tokens({"model.path=" + (dir_ / "whole/final").string()})),
              1000);
  EXPECT_EQ(data::Tokenizer::load(dir_ / "again/final")->vocab_size(), tokenizer->vocab_size());
}

TEST_F(VocabularyTest, SpareRowsAreUsedBeforeTheTableGrows) {
  make_model("roomy", {{"vocab_size", 4200}});
  train_until(
      config("run", {"model.added_tokens=['<|one|>']", "model.path=" + (dir_ / "roomy").string()}),
      1000);
  const auto exported = nlohmann::json::parse(files::read(dir_ / "run/final/config.json"));
  EXPECT_EQ(exported.at("vocab_size"), 4200);
  EXPECT_TRUE(data::Tokenizer::load(dir_ / "run/final")->id_of("<|one|>").has_value());
}

TEST_F(VocabularyTest, AnAdapterMustTrainTheNewRows) {
  const auto lora = [&](std::vector<std::string> more) {
    more.push_back("train.method=lora");
    return with_tokens(std::move(more));
  };
  EXPECT_THAT(refusal_of(lora({})),
              ::testing::AllOf(HasSubstr("command line: model.added_tokens"),
                               HasSubstr("adapter.modules_to_save: [embed_tokens]")));
  train_until(config("run", lora({"adapter.modules_to_save=[embed_tokens]"})), 1000);
  ASSERT_EQ(run_cli({"score", (dir_ / "model").string(), "--adapter", (dir_ / "run/final").string(),
                     "--input", (dir_ / "marked.jsonl").string(), "--output",
                     (dir_ / "scored").string(), "--threads", "1"}),
            0);
  EXPECT_THAT(
      files::read(dir_ / "scored"),
      HasSubstr(std::to_string(data::Tokenizer::load(dir_ / "run/final")->vocab_size() - 1)));
}

TEST_F(VocabularyTest, WrongSizesAndTokensAreNamed) {
  EXPECT_THAT(refusal_of({"model.resize_vocab=4000"}), HasSubstr("shrinking is not built"));
  EXPECT_THAT(refusal_of(with_tokens({"model.resize_vocab=4097"})), HasSubstr("which need"));
  EXPECT_THAT(refusal_of({"model.added_tokens=['<x>', '<x>']"}), HasSubstr("'<x>' stands twice"));
}

}  // namespace
}  // namespace heddle
