// Rows of several texts that belong together.
#include "data/readers/group_row.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "data/json/json_text.h"
#include "data/readers/row.h"
#include "testing/message_of.h"

namespace heddle::data {
namespace {

using heddle::testing::message_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const GroupShape kQueries = {.texts = {"query", "positive"}, .more = "negatives"};

RowOptions group_options(const GroupShape& shape) {
  RowOptions options;
  options.task = Task::kGroup;
  options.group = shape;
  return options;
}

Row pairs_of(const std::string& json, const GroupShape& shape = kQueries) {
  return parse_row(nlohmann::ordered_json::parse(json), group_options(shape));
}

TEST(Pairs, AreTextsConversationsOrTokens) {
  const Row row = pairs_of(
      R"({"query": "a?", "positive": [{"role": "user", "content": "b"}], "negatives": [[3, 4], "c"]})");
  ASSERT_EQ(row.form, Row::Form::kGroup);
  ASSERT_EQ(row.texts.size(), 4u);
  EXPECT_EQ(row.texts[0].text, "a?");
  EXPECT_EQ(row.texts[1].form, Row::Form::kConversation);
  EXPECT_EQ(row.texts[1].messages[0]["content"], "b");
  EXPECT_EQ(row.texts[2].input_ids, (std::vector<std::int32_t>{3, 4}));
  EXPECT_EQ(row.texts[3].text, "c");
  EXPECT_EQ(pairs_of(R"({"query": "a", "positive": ["b"]})").texts.size(), 2u);
  EXPECT_EQ(pairs_of(R"({"query": "a", "positive": "b", "negatives": []})").texts.size(), 2u);
  EXPECT_EQ(pairs_of(R"({"query": "a", "positive": "b", "negatives": "c"})").texts[2].text, "c");
}

TEST(Pairs, TakeTheFieldsOfOtherTrainersByName) {
  const GroupShape swift = {.texts = {"messages", "positive_messages"},
                            .more = "negative_messages"};
  const Row row = pairs_of(R"({"messages": [{"role": "user", "content": "q"}],
      "positive_messages": [[{"role": "user", "content": "p"}]],
      "negative_messages": [[{"role": "user", "content": "n1"}], [{"role": "user", "content": "n2"}]]})",
                           swift);
  ASSERT_EQ(row.texts.size(), 4u);
  EXPECT_EQ(row.texts[3].messages[0]["content"], "n2");
}

TEST(Pairs, NameWhatIsWrong) {
  const auto error = [](const std::string& json) { return message_of([&] { pairs_of(json); }); };
  EXPECT_THAT(error(R"({"query": "a", "document": "b"})"),
              HasSubstr("field 'positive': is missing"));
  EXPECT_THAT(error(R"({"query": "", "positive": "b"})"), HasSubstr("field 'query': is empty"));
  EXPECT_THAT(error(R"({"query": "a", "positive": ["b", "c"]})"), HasSubstr("holds 2 texts"));
  EXPECT_THAT(error(R"({"query": "a", "positive": "b", "negatives": ["c", 3]})"),
              HasSubstr("field 'negatives[1]'"));
  EXPECT_THAT(error(R"({"query": {"a": 1}, "positive": "b"})"), HasSubstr("expected a text"));
  RowOptions options;
  options.format = RowFormat::kPairs;
  EXPECT_THAT(message_of([&] {
                parse_row({{"query", "a"}, {"positive", "b"}}, options);
              }),
              HasSubstr("this run learns from single texts"));
  options = group_options(kQueries);
  options.format = RowFormat::kText;
  EXPECT_THAT(message_of([&] {
                parse_row({{"text", "a"}}, options);
              }),
              HasSubstr("learns from 'pairs'"));
}

const GroupShape kAnswers = {.texts = {"chosen", "rejected"}, .prompt = "prompt", .learns = true};

TEST(Pairs, ManyTextsAndLargeVariablesAreRefusedBeforeTheyAreCopied) {
  const auto row = [](const std::string& text, int texts, int variables) {
    std::string line = R"({"query": "a", "positive": "b", "negatives": [)";
    for (int i = 0; i < texts; ++i) line += (i > 0 ? "," : "") + text;
    line += R"(], "chat_template_kwargs": {"x": 0)";
    for (int i = 0; i < variables; ++i) line += fmt::format(",\"variable {}\": {}", i, i);
    return line + "}}";
  };
  const auto read = [](const std::string& line) {
    return parse_row(json_text::parse(line), group_options(kQueries));
  };
  const std::string word = "\"c\"", turn = R"([{"role": "user", "content": "c"}])";
  EXPECT_EQ(read(row(word, 65'536, 100'000)).texts.size(), 65'538u);
  EXPECT_EQ(read(row(turn, 20, 100'000)).texts.back().template_variables.size(), 100'001u);
  EXPECT_EQ(read(row(turn, 65'536, 3)).texts.back().template_variables.size(), 4u);
  EXPECT_THAT(message_of([&] { read(row(turn, 1000, 100'000)); }),
              HasSubstr("field 'chat_template_kwargs': takes"));
  EXPECT_THAT(message_of([&] { read(row(turn, 60'000, 1000)); }), HasSubstr("60000 conversations"));
  EXPECT_THAT(message_of([&] { read(row(word, 65'537, 0)); }),
              HasSubstr("field 'negatives': holds 65537 texts"));
  EXPECT_THAT(message_of([&] { read(row(turn, 400'000, 400'000)); }), HasSubstr("holds 400000"));
}

TEST(Answers, FollowAPromptOfTheirOwn) {
  const Row texts = pairs_of(R"({"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"})", kAnswers);
  ASSERT_EQ(texts.texts.size(), 2u);
  EXPECT_EQ(texts.texts[1].prompt, "2 + 2 = ");
  EXPECT_EQ(texts.texts[1].text, "5");
  EXPECT_EQ(texts.texts[1].task, Task::kGroup);
  const Row talks = pairs_of(R"({"prompt": [{"role": "user", "content": "q"}],
      "chosen": [{"role": "assistant", "content": "a"}],
      "rejected": [{"role": "assistant", "content": "b"}], "tools": [{"name": "t"}]})",
                             kAnswers);
  EXPECT_EQ(talks.texts[0].messages.size(), 2u);
  EXPECT_EQ(talks.texts[1].messages[1]["content"], "b");
  EXPECT_EQ(talks.texts[1].message_weights.size(), 2u);
  EXPECT_EQ(talks.texts[1].prompt_messages, 1u);
  EXPECT_EQ(talks.texts[1].tools[0]["name"], "t");
  const Row ids =
      pairs_of(R"({"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]})", kAnswers);
  EXPECT_EQ(ids.texts[1].input_ids, (std::vector<std::int32_t>{1, 2, 4, 5}));
  EXPECT_EQ(ids.texts[1].labels, (std::vector<std::int32_t>{-100, -100, 4, 5}));
}

TEST(Answers, ShareAPromptInWholeTexts) {
  const char* const kTalks = R"("chosen": [{"role": "system", "content": "s"},
      {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
      "rejected": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
      {"role": "assistant", "content": "b"}, {"role": "user", "content": "why?"}])";
  for (const std::string prompt : {"", R"("prompt": "q", )"}) {
    const Row row = pairs_of("{" + prompt + kTalks + "}", kAnswers);
    EXPECT_EQ(row.texts[0].prompt_messages, 2u);
    EXPECT_EQ(row.texts[1].prompt_messages, 2u);
    EXPECT_EQ(row.texts[1].messages.size(), 4u);
  }
  // Up to the space before the first difference, and not within a character (\u00e9, \u00e8).
  const Row texts =
      pairs_of(R"({"chosen": "Is it so? yes", "rejected": "Is it so? no"})", kAnswers);
  EXPECT_EQ(texts.texts[0].prompt, "Is it so?");
  EXPECT_EQ(texts.texts[1].text, " no");
  const Row accents = pairs_of(R"({"chosen": "caf\u00e9", "rejected": "caf\u00e8"})", kAnswers);
  EXPECT_EQ(accents.texts[0].prompt, "caf");
  EXPECT_EQ(accents.texts[0].text, "\u00e9");
}

TEST(Answers, NameWhatIsWrong) {
  const auto error = [](const std::string& json) {
    return message_of([&] { pairs_of(json, kAnswers); });
  };
  EXPECT_THAT(error(R"({"prompt": "a", "chosen": "b"})"),
              HasSubstr("field 'rejected': is missing"));
  EXPECT_THAT(error(R"({"prompt": "a", "chosen": "b", "rejected": ""})"),
              HasSubstr("field 'rejected': is empty"));
  EXPECT_THAT(
      error(R"({"prompt": [{"role": "user", "content": "q"}], "chosen": "b", "rejected": "c"})"),
      HasSubstr("field 'chosen': does not fit 'prompt'"));
  EXPECT_THAT(error(R"({"chosen": "yes", "rejected": "yes it is"})"),
              HasSubstr("field 'chosen': is also the beginning of 'rejected'"));
  EXPECT_THAT(error(R"({"chosen": "a", "rejected": [{"role": "user", "content": "q"}]})"),
              HasSubstr("field 'rejected': is of another kind than 'chosen'"));
  EXPECT_THAT(error(R"({"prompt_ids": [1], "chosen_ids": [2]})"),
              HasSubstr("field 'rejected_ids': is missing"));
  EXPECT_THAT(error(R"({"prompt_ids": [1], "chosen_ids": [], "rejected_ids": [3]})"),
              HasSubstr("field 'chosen_ids': is an empty list"));
}

}  // namespace
}  // namespace heddle::data
