// Rows of `heddle eval`: what is asked, and what is right.
#include "cli/eval_rows.h"

#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/eval_metrics.h"
#include "data/batch.h"
#include "testing/message_of.h"
#include "testing/paths.h"
#include "testing/temporary_directory.h"

namespace heddle::cli {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

class EvalRowsTest : public ::testing::Test {
 protected:
  EvalRows rows(const Json& row) {
    std::ofstream(dir_ / "rows.jsonl") << row.dump() << "\n";
    options_.input = (dir_ / "rows.jsonl").string();
    data::RowOptions reading;
    reading.task = data::Task::kEmbedding;
    return {*tokenizer_, options_, {}, reading};
  }
  EvalCase read(const Json& row) { return rows(row).read().at(0); }
  Json truth(const Json& row) { return read(row).truth; }
  std::int64_t choice(const Json& row) {
    const EvalRows all = rows(row);
    return all.right_choice(all.read().at(0));
  }
  /// Text of the tokens that perplexity is of.
  std::string learned(const Json& row) {
    const EvalRows all = rows(row);
    const data::TokenizedRow found = all.learned(all.read().at(0));
    std::vector<std::int32_t> ids;
    for (std::size_t i = 0; i < found.labels.size(); ++i)
      if (found.labels[i] != data::kIgnoredLabel && found.weights[i] > 0)
        ids.push_back(found.labels[i]);
    return tokenizer_->decode(ids, /*skip_special_tokens=*/true);
  }
  static Json turn(const std::string& role, const Json& content) {
    return {{"role", role}, {"content", content}};
  }

  std::shared_ptr<const data::Tokenizer> tokenizer_ =
      data::Tokenizer::load(testing::source_path("examples/tokenizer-4k"));
  testing::TemporaryDirectory dir_;
  EvalRowOptions options_;
};

TEST_F(EvalRowsTest, ATurnThatIsNotLearnedIsRightAllTheSame) {
  const Json call = {{"function", {{"name", "f"}, {"arguments", Json::object()}}}};
  for (const Json& flag : {Json{{"weight", 0}}, Json{{"weight", 1}}, Json{{"loss", false}}}) {
    Json last = turn("assistant", "");
    last["tool_calls"] = Json::array({call});
    last.update(flag);
    const Json found =
        truth({{"messages",
                {turn("user", "a"), turn("assistant", "keep line"), turn("user", "b"), last}}});
    EXPECT_THAT(found.get<std::string>(), HasSubstr("f")) << flag;
    EXPECT_THAT(found.get<std::string>(), ::testing::Not(HasSubstr("keep"))) << flag;
  }
}

TEST_F(EvalRowsTest, TheRightAnswerOfAConversationIsItsLastTurn) {
  EXPECT_EQ(truth({{"prompt", {turn("user", "a")}}, {"completion", {turn("assistant", "x")}}}),
            "x");
  const Json parts =
      Json::array({{{"type", "text"}, {"text", "b"}}, {{"type", "text"}, {"text", "c"}}});
  EXPECT_EQ(truth({{"messages", {turn("user", "a"), turn("assistant", parts)}}}), "bc");
}

TEST_F(EvalRowsTest, NullColumnsAreAbsent) {
  const Json messages = {turn("user", "a"), turn("assistant", "b")};
  EXPECT_EQ(truth({{"messages", messages}, {"answer", nullptr}, {"choices", nullptr}}), "b");
  EXPECT_EQ(truth({{"messages", nullptr}, {"prompt", "q"}, {"answer", "x"}}), "x");
  EXPECT_EQ(truth({{"completion", nullptr}, {"prompt", "q"}, {"answer", "x"}}), "x");
}

TEST_F(EvalRowsTest, AnAnswerIsTheTextOfAChoiceBeforeItsNumberOrLetter) {
  const auto of = [](const Json& choices, const Json& answer) {
    return Json{{"prompt", "q"}, {"choices", choices}, {"answer", answer}};
  };
  EXPECT_EQ(choice(of({2, 1, 0}, 2)), 0);
  EXPECT_EQ(choice(of({12, 15, 20}, 15)), 1);
  EXPECT_EQ(choice(of({true, false}, false)), 1);
  EXPECT_EQ(choice(of({"x", "y"}, 1)), 1);
  EXPECT_EQ(choice(of({"x", "y"}, "B")), 1);
  EXPECT_EQ(choice(of({"B", "A"}, "A")), 1);
  EXPECT_THAT(testing::message_of([&] {
                choice(of({"x", "y"}, 7));
              }),
              HasSubstr("none of the choices"));
}

TEST_F(EvalRowsTest, PerplexityIsOfTheAnswer) {
  EXPECT_THAT(learned({{"text", "some words"}, {"answer", "entirely other"}}),
              ::testing::EndsWith("entirely other"));
  EXPECT_THAT(learned({{"text", "some words"}, {"answer", "b"}}),
              ::testing::Not(HasSubstr("words")));
  EXPECT_THAT(learned({{"text", "some words"}}), HasSubstr("words"));
  EXPECT_THAT(learned({{"prompt", "some words"}, {"completion", " four"}}),
              ::testing::StartsWith(" four"));
  EXPECT_THAT(learned({{"prompt", "q"}, {"answer", "b"}}), HasSubstr("b"));
  options_.raw = true;
  EXPECT_EQ(learned({{"prompt", "q"}, {"answer", "b"}}), " b");
  options_.raw = false;
  EXPECT_THAT(learned({{"conversations", {{{"from", "human"}, {"value", "a"}}}}, {"answer", "b"}}),
              HasSubstr("b"));
  const std::string text = Json{turn("user", "a"), turn("assistant", "b")}.dump();
  EXPECT_THAT(learned({{"messages", text}}), HasSubstr("b"));
}

TEST(WordF1, CountsAsSquadDoes) {
  EXPECT_EQ(word_f1("The cat, sat!", "a cat sat"), 1);
  EXPECT_DOUBLE_EQ(word_f1("cat", "cat\u00a0sat"), 2.0 / 3);
  EXPECT_EQ(word_f1("\u00c9cole", "\u00e9cole"), 1);
  EXPECT_EQ(word_f1("\u041c\u0418\u0420", "\u043c\u0438\u0440"), 1);
  EXPECT_EQ(word_f1("", ""), 1);
  EXPECT_EQ(best_word_f1("keep it", Json{"nothing", "keep it"}), 1);
  EXPECT_EQ(best_word_f1("7", Json(7)), 1);
  EXPECT_EQ(best_word_f1("7", Json::array()), 0);
}

}  // namespace
}  // namespace heddle::cli
