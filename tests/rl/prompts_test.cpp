// Rows of data.train and data.eval as prompts: which are taken, how often, and in which order.
#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "data/tokenizer/tokenizer.h"
#include "rl/prompts.h"
#include "rl/rl_fixture.h"
#include "testing/message_of.h"

namespace heddle {
namespace {

using rl::Prompts;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using train::DataPart;

class PromptsTest : public RlTest {
 protected:
  std::string file(const char* name, const std::vector<std::string>& lines) const {
    std::ofstream file(dir_ / name);
    for (const std::string& line : lines) file << line << "\n";
    return (dir_ / name).string();
  }
  static std::vector<std::string> rows(int count, const std::string& word = "say") {
    std::vector<std::string> lines;
    for (int i = 0; i < count; ++i)
      lines.push_back(
          nlohmann::json{{"prompt", word + " " + std::to_string(i)}, {"answer", "k"}}.dump());
    return lines;
  }
  Prompts prompts(const config::RunConfig& config, DataPart part = DataPart::kTrain) const {
    return Prompts(config, part, *tokenizer_);
  }
  std::string message_of(const config::RunConfig& config) const {
    return testing::message_of([&] { prompts(config); });
  }
  static std::set<std::string> texts(const Prompts& prompts) {
    std::set<std::string> texts;
    for (std::int64_t row = 0; row < prompts.size(); ++row) texts.insert(prompts.row(row).text);
    return texts;
  }
  /// How often each row is in an epoch.
  static std::map<std::int64_t, int> counts(const Prompts& prompts, std::int64_t epoch) {
    std::map<std::int64_t, int> counts;
    for (std::int64_t i = 0; i < prompts.per_epoch(); ++i)
      ++counts[prompts.index_of(epoch * prompts.per_epoch() + i)];
    return counts;
  }

  std::shared_ptr<const data::Tokenizer> tokenizer_ = data::Tokenizer::load(kTokenizer);
};

TEST_F(PromptsTest, AShareOfTheRowsIsHeldOutAndNotTrainedOn) {
  const config::RunConfig config =
      run("share", {"data.train=" + file("rows.jsonl", rows(200)), "data.eval=0.2"});
  const Prompts train = prompts(config), eval = prompts(config, DataPart::kEval);
  EXPECT_EQ(train.size() + eval.size(), 200);
  EXPECT_NEAR(static_cast<double>(eval.size()), 40, 25);
  std::set<std::string> both = texts(train);
  both.merge(texts(eval));
  EXPECT_THAT(both, SizeIs(200));
  // So few rows may leave the share empty.
  EXPECT_THAT(testing::message_of([&] {
                prompts(run("few", {"data.train=" + file("one.jsonl", rows(1)), "data.eval=1e-6"}),
                        DataPart::kEval);
              }),
              HasSubstr("data.eval: the share 1e-06 of data.train has no row"));
}

TEST_F(PromptsTest, WeightsSayHowOftenAnEpochHasAFile) {
  const std::string often = file("often.jsonl", rows(4, "often")),
                    half = file("half.jsonl", rows(6, "half"));
  const std::string sources =
      "data.train=[{path: " + often + ", weight: 2}, {path: " + half + ", weight: 0.5}]";
  for (const char* shuffle : {"data.shuffle=true", "data.shuffle=false"}) {
    const Prompts train = prompts(run("weights", {sources, shuffle}));
    EXPECT_EQ(train.size(), 10);
    EXPECT_EQ(train.per_epoch(), 11);
    std::set<std::set<std::int64_t>> halves;
    for (std::int64_t epoch = 0; epoch < 8; ++epoch) {
      std::set<std::int64_t> chosen;
      for (const auto& [row, count] : counts(train, epoch)) {
        EXPECT_EQ(count, row < 4 ? 2 : 1) << row;
        if (row >= 4) chosen.insert(row);
      }
      EXPECT_THAT(chosen, SizeIs(3));
      halves.insert(chosen);
    }
    EXPECT_GT(halves.size(), 1U) << "each epoch draws its part anew";
  }
  // Another weight is another stream of prompts.
  EXPECT_NE(prompts(run("same", {"data.train=" + often})).key(),
            prompts(run("more", {"data.train=[{path: " + often + ", weight: 2}]"})).key());
}

TEST_F(PromptsTest, BadRowsStopOrAreCounted) {
  std::vector<std::string> lines = rows(3);
  lines.insert(lines.begin() + 1, "no json");
  lines.push_back(R"({"prompt": 5, "answer": "k"})");
  lines.push_back(R"({"prompt": "say"})");
  lines.push_back("");
  const std::string train = "data.train=" + file("bad.jsonl", lines);
  EXPECT_THAT(message_of(run("error", {train})), HasSubstr("bad.jsonl:2: not valid JSON"));
  const Prompts kept = prompts(run("skip", {train, "data.on_bad_line=skip"}));
  EXPECT_EQ(kept.size(), 3);
  EXPECT_EQ(kept.row(1).place, (dir_ / "bad.jsonl").string() + ":3");
  EXPECT_EQ(kept.report().bad_rows, 3);
  EXPECT_EQ(kept.report().lines, 6);
  EXPECT_THAT(kept.report().bad_examples,
              ElementsAre(HasSubstr("bad.jsonl:2: "), HasSubstr("bad.jsonl:5: field 'prompt'"),
                          HasSubstr("bad.jsonl:6: the row has no 'answer'")));
  EXPECT_THAT(message_of(run("none", {"data.train=" + file("none.jsonl", {"no json"}),
                                      "data.on_bad_line=skip"})),
              HasSubstr("data.train: there is no row, 1 bad rows skipped"));
}

TEST_F(PromptsTest, ColumnsThatAreNotReadAreNamed) {
  const auto of = [&](const char* name, const std::string& row) {
    return run(name, {"data.train=" + file(name, {R"({"prompt": "a", "answer": "k"})", row})});
  };
  const Prompts both = prompts(of(
      "both", R"({"prompt": "b", "messages": [{"role": "user", "content": "c"}], "answer": "k"})"));
  EXPECT_THAT(both.prompt_and_messages(), HasSubstr("both:2"));
  const Prompts one = prompts(of("one", R"({"prompt": "b", "messages": null, "answer": "k"})"));
  EXPECT_EQ(one.prompt_and_messages(), "");
  EXPECT_THAT(message_of(of("empty", R"({"prompt": [], "answer": "k"})")),
              HasSubstr("field 'prompt': is an empty list"));
}

TEST_F(PromptsTest, LongPromptsAreErrorsLeftOutOrCut) {
  std::string words;
  for (int i = 0; i < 40; ++i) words += " w" + std::to_string(i);
  std::vector<std::string> lines = rows(1);
  lines.push_back(nlohmann::json{{"prompt", words}, {"answer", "k"}}.dump());
  const auto cut = [&](const char* how, int max_length) {
    return run(how,
               {"data.train=" + file("long.jsonl", lines), std::string("data.truncation=") + how,
                "data.max_length=" + std::to_string(max_length)});
  };
  EXPECT_THAT(message_of(cut("auto", 64)), HasSubstr("long.jsonl:2: the prompt has "));
  const Prompts dropped = prompts(cut("drop", 64));
  EXPECT_EQ(dropped.size(), 1);
  EXPECT_EQ(dropped.report().dropped_long, 1);
  const std::vector<std::int32_t> whole = prompts(cut("auto", 256)).row(1).tokens;
  for (const bool keeps_end : {false, true}) {
    const Prompts kept = prompts(cut(keeps_end ? "keep_end" : "keep_start", 64));
    ASSERT_EQ(kept.size(), 2);
    const std::vector<std::int32_t>& tokens = kept.row(1).tokens;
    ASSERT_THAT(tokens, SizeIs(58));
    EXPECT_TRUE(
        std::equal(tokens.begin(), tokens.end(), keeps_end ? whole.end() - 58 : whole.begin()));
    EXPECT_EQ(kept.report().truncated, 1);
  }
  EXPECT_THAT(testing::message_of([&] { cut("split", 64); }),
              HasSubstr("data.truncation: split is for single texts"));
}

}  // namespace
}  // namespace heddle
