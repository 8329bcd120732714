#include "data/readers/jsonl_reader.h"

#include <cmath>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "testing/message_of.h"
#include "testing/parameter_name.h"
#include "testing/temporary_directory.h"

namespace heddle::data {
namespace {

using heddle::testing::message_of;
using heddle::testing::ParameterName;
using heddle::testing::TemporaryDirectory;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Row parse(const std::string& line, ReaderOptions options = {}) {
  return parse_line(line, {"data.jsonl", 12}, options);
}
std::string complaint(const std::string& line, ReaderOptions options = {}) {
  return message_of([&] { parse(line, options); });
}

TEST(Row, ReadsMessagesWithToolsAndWeights) {
  const Row row = parse(R"({"id": 7, "messages": [{"role": "system", "content": "Be kind."},
      {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
      {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f"}}], "weight": 0},
      {"role": "tool", "content": "3"},
      {"role": "assistant", "content": "four", "reasoning_content": "r", "weight": 0.25}],
      "tools": "[{\"type\": \"function\"}]"})");
  EXPECT_EQ(row.format, RowFormat::kMessages);
  EXPECT_EQ(row.form, Row::Form::kConversation);
  ASSERT_EQ(row.messages.size(), 5u);
  EXPECT_EQ(row.messages[1]["content"].dump(),
            R"([{"type":"text","text":"a"},{"type":"text","text":"b"}])");
  EXPECT_FALSE(row.messages[2].contains("content"));
  EXPECT_EQ(row.messages[4]["reasoning_content"], "r");
  EXPECT_FALSE(row.messages[4].contains("weight"));
  EXPECT_TRUE(std::isnan(row.message_weights[1]));
  EXPECT_EQ(row.message_weights[2], 0);
  EXPECT_EQ(row.message_weights[4], 0.25);
  EXPECT_EQ(row.tools.size(), 1u);
}

TEST(Row, ReadsTheOtherFormats) {
  Row row =
      parse(R"({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
                       {"from": "gpt", "value": "a", "weight": 0.5}, {"from": "observation", "value": "o"}]})");
  EXPECT_EQ(row.messages.dump(),
            R"([{"role":"system","content":"s"},{"role":"user","content":"q"},)"
            R"({"role":"assistant","content":"a"},{"role":"tool","content":"o"}])");
  EXPECT_EQ(row.message_weights[2], 0.5);
  row = parse(
      R"({"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})");
  EXPECT_EQ(row.messages[1]["content"], "a");

  row = parse(R"({"instruction": "Add.", "input": "1 2", "output": "3", "system": "s",
                  "history": [["q1", "a1"]]})");
  EXPECT_EQ(row.format, RowFormat::kInstruction);
  EXPECT_EQ(row.messages.size(), 5u);
  EXPECT_EQ(row.messages[3]["content"], "Add.\n\n1 2");
  EXPECT_EQ(parse(R"({"instruction": "Add.", "input": "", "output": "3"})").messages[0]["content"],
            "Add.");

  row = parse(R"({"prompt": "2 + 2 =", "completion": " 4"})");
  EXPECT_EQ(row.form, Row::Form::kText);
  EXPECT_EQ(row.prompt, "2 + 2 =");
  EXPECT_EQ(row.text, " 4");
  row = parse(R"({"prompt": [{"role": "user", "content": "q"}],
                  "completion": [{"role": "assistant", "content": "a"}]})");
  EXPECT_EQ(row.form, Row::Form::kConversation);
  EXPECT_EQ(row.prompt_messages, 1u);

  row = parse(R"({"text": "plain", "meta": {"source": "x"}, "prompt": null})");
  EXPECT_EQ(row.format, RowFormat::kText);
  EXPECT_EQ(row.text, "plain");

  row = parse(R"({"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "text": "also here"})");
  EXPECT_EQ(row.form, Row::Form::kTokens);
  EXPECT_THAT(row.labels, ElementsAre(-100, 2, 3));
}

TEST(Row, ReadsTargetsAndRenamedFields) {
  ReaderOptions options;
  options.task = Task::kClassification;
  EXPECT_EQ(parse(R"({"text": "good", "label": 3})", options).target, 3);
  EXPECT_EQ(parse(R"({"text": "good", "label": "3"})", options).target, 3);
  options.classes = 3;
  EXPECT_THAT(complaint(R"({"text": "good", "label": 3})", options),
              HasSubstr("field 'label': is 3, but model.num_labels is 3: expected 0 to 2"));
  ReaderOptions stars = options;
  stars.class_names = {"1", "2", "3"};
  EXPECT_EQ(parse(R"({"text": "good", "label": 3})", stars).target, 2);
  EXPECT_EQ(parse(R"({"text": "good", "label": "3"})", stars).target, 2);
  for (const char* row : {R"({"text": "good", "label": 0})", R"({"text": "good", "label": "0"})"})
    EXPECT_THAT(complaint(row, stars), HasSubstr("expected one of the 3 labels: 1, 2, 3"));
  EXPECT_THAT(complaint(R"({"text": "good", "label": 1.5})", options),
              HasSubstr("field 'label': is 1.5"));
  EXPECT_THAT(complaint(R"({"text": "good", "label": -1})", options),
              HasSubstr("number of a class"));
  EXPECT_THAT(complaint(R"({"text": "good"})", options), HasSubstr("field 'label': is missing"));
  options.task = Task::kRegression;
  EXPECT_EQ(parse(R"({"text": "good", "label": -1.5})", options).target, -1.5);

  options = {};
  options.fields.text = "content";
  EXPECT_EQ(parse(R"({"content": "x"})", options).text, "x");
  options.format = RowFormat::kText;
  EXPECT_THAT(complaint(R"({"contents": "x"})", options), HasSubstr("did you mean 'contents'"));
}

struct BadLine {
  const char* name;
  const char* line;
  const char* reason;
};

void PrintTo(const BadLine& c, std::ostream* out) { *out << c.name; }

class BadRows : public ::testing::TestWithParam<BadLine> {};

TEST_P(BadRows, NameFileLineFieldAndReason) {
  const std::string message = complaint(GetParam().line);
  EXPECT_THAT(message, StartsWith("data.jsonl:12: "));
  EXPECT_THAT(message, HasSubstr(GetParam().reason));
}

INSTANTIATE_TEST_SUITE_P(
    Row, BadRows,
    ::testing::Values(
        BadLine{"OpenObject", R"({"text": "x")", "not valid JSON"},
        BadLine{"TextAfterObject", R"({"text": "x"} y)", "not valid JSON"},
        BadLine{"NoUtf8", "{\"text\": \"\xff\"}", "UTF-8"},
        BadLine{"KeyTwice", R"({"text": "x", "text": "y"})", "the key 'text' occurs twice"},
        BadLine{"InnerKeyTwice", R"({"text": "x", "meta": {"a": 1, "b": 2, "a": 3}})",
                "the key 'a' occurs twice"},
        BadLine{"Nan", R"({"text": "x", "score": NaN})", "NaN at column 24 is no JSON number"},
        BadLine{"NegativeInfinity", R"({"text": "x", "score": -Infinity})", "-Infinity at column"},
        BadLine{"CutInside", R"({"text": "x", "a": [1, 2)", "the text ends inside a value"},
        BadLine{"CommaAtTheEnd", R"({"text": "x"},)", "the line ends with a comma"},
        BadLine{"Latin1", "{\"text\": \"caf\xe9\"}", "byte 0xE9 at column 14 is not UTF-8"},
        BadLine{"LoneSurrogate", R"({"text": "\ud800"})", "not valid JSON"},
        BadLine{"Number", "12", "the row is a JSON number, expected an object"},
        BadLine{"List", R"([{"text": "x"}])", "jq -c '.[]'"},
        BadLine{"EmptyObject", "{}", "the row has no field"},
        BadLine{"MisspeltField", R"({"txet": "x"})", "no field tells the row's format"},
        BadLine{"EmptyText", R"({"text": ""})", "field 'text': is empty"},
        BadLine{"TextIsNumber", R"({"text": 5})",
                "field 'text': is a JSON number, expected a string"},
        BadLine{"MessagesIsString", R"({"messages": "x"})",
                "field 'messages': is a JSON string, expected a list"},
        BadLine{"MessagesIsEmpty", R"({"messages": []})", "field 'messages': is an empty list"},
        BadLine{"MessageIsNumber", R"({"messages": [5]})", "field 'messages[0]': is a JSON number"},
        BadLine{"MessageWithoutRole", R"({"messages": [{"content": "x"}]})",
                "field 'messages[0].role': is missing"},
        BadLine{"EmptyRole", R"({"messages": [{"role": "", "content": "x"}]})",
                "field 'messages[0].role': is empty"},
        BadLine{"MessageWithoutContent", R"({"messages": [{"role": "user"}]})",
                "field 'messages[0].content': is missing"},
        BadLine{"ContentIsNumber", R"({"messages": [{"role": "user", "content": 5}]})",
                "field 'messages[0].content': is a JSON"},
        BadLine{"NegativeWeight",
                R"({"messages": [{"role": "assistant", "content": "x", "weight": -1}]})",
                "field 'messages[0].weight': is -1, expected a finite number >= 0"},
        BadLine{"WeightIsString",
                R"({"messages": [{"role": "assistant", "content": "x", "weight": "a"}]})",
                "field 'messages[0].weight': is a JSON string"},
        BadLine{"WeightOfUser", R"({"messages": [{"role": "user", "content": "x", "weight": 1}]})",
                "only assistant messages carry loss"},
        BadLine{
            "ImagePart",
            R"({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]})",
            "field 'messages[0].content[0]': holds a part of type 'image_url'. Heddle trains on "
            "text"},
        BadLine{"TextPartWithoutText",
                R"({"messages": [{"role": "user", "content": [{"type": "text"}]}]})",
                "a part without 'text'"},
        BadLine{"ToolsIsObject",
                R"({"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}})",
                "field 'tools': is a JSON object, expected a list"},
        BadLine{"ToolsIsCutJson",
                R"({"messages": [{"role": "user", "content": "x"}], "tools": "[{"})",
                "not valid JSON"},
        BadLine{"Images", R"({"text": "see", "images": ["a.png"]})",
                "field 'images': the row comes with media"},
        BadLine{"Audio", R"({"text": "see", "audio": "a.wav"})", "jq -c 'del(.audio)'"},
        BadLine{"UnknownSpeaker", R"({"conversations": [{"from": "alien", "value": "x"}]})",
                "field 'conversations[0].from': is 'alien', expected human"},
        BadLine{"TurnWithoutValue", R"({"conversations": [{"from": "gpt"}]})",
                "field 'conversations[0].value': is missing"},
        BadLine{"StringPromptListCompletion", R"({"prompt": "x", "completion": []})",
                "both must be strings or both lists"},
        BadLine{"EmptyCompletion", R"({"prompt": "x", "completion": ""})",
                "field 'completion': is empty"},
        BadLine{"NullOutput", R"({"instruction": "x", "output": null})", "no field tells"},
        BadLine{"EmptyInstruction", R"({"instruction": "", "output": "x"})",
                "field 'instruction': is empty"},
        BadLine{"HistoryIsNoPair", R"({"instruction": "x", "output": "y", "history": [["a"]]})",
                "not a pair"},
        BadLine{"NoInputIds", R"({"input_ids": []})", "field 'input_ids': is an empty list"},
        BadLine{"NegativeInputId", R"({"input_ids": [1, -2]})",
                "field 'input_ids[1]': is -2, expected a token id"},
        BadLine{"FractionalInputId", R"({"input_ids": [1.5]})",
                "field 'input_ids[0]': is 1.5, expected a token id"},
        BadLine{"HugeInputId", R"({"input_ids": [18446744073709551615]})",
                "field 'input_ids[0]': is 18446744073709551615"},
        BadLine{"MaskOfSequences", R"({"input_ids": [1, 2], "attention_mask": [1, 2]})",
                "field 'attention_mask[1]': is 2, expected 0 or 1"},
        BadLine{"MaskWithHole", R"({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]})",
                "field 'attention_mask[1]': is 0 between tokens"},
        BadLine{"MaskOfNothing", R"({"input_ids": [1, 2], "attention_mask": [0, 0]})",
                "field 'attention_mask': is 0 for every token"},
        BadLine{"ShortMask", R"({"input_ids": [1, 2], "completion_mask": [1]})",
                "field 'completion_mask': has 1 entries but 'input_ids' has 2"},
        BadLine{"LengthsDoNotAddUp", R"({"input_ids": [1, 2, 3], "seq_lengths": [1, 1]})",
                "field 'seq_lengths': adds up to 2 tokens"},
        BadLine{"PositionsJump", R"({"input_ids": [1, 2, 3], "position_ids": [0, 1, 5]})",
                "field 'position_ids[2]': is 5, expected 0 or 2"},
        BadLine{"ArgumentsAreNoJson",
                R"({"messages": [{"role": "user", "content": "x"}, {"role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "city: A"}}]}]})",
                "field 'messages[1].tool_calls[0].function.arguments': is JSON text that cannot"},
        BadLine{
            "ArgumentsAreAList",
            R"({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}},
                    {"name": "f", "arguments": "[1]"}]}]})",
            "field 'messages[0].tool_calls[1].arguments': is JSON text of type array"},
        BadLine{"OldCallIsNoJson",
                R"({"messages": [{"role": "assistant",
                    "function_call": {"name": "f", "arguments": "{"}}]})",
                "field 'messages[0].function_call.function.arguments': is JSON text"},
        BadLine{"CallWithoutName",
                R"({"conversations": [{"from": "function_call", "value": "{}"}]})",
                "field 'conversations[0].value': names no tool"},
        BadLine{"TrainAUser", R"({"messages": [{"role": "user", "content": "x", "train": true}]})",
                "only assistant messages carry loss"},
        BadLine{"LossIsAMeasure",
                R"({"messages": [{"role": "assistant", "content": "x", "loss": 2.3}]})",
                "field 'messages[0].loss': is 2.3, expected true or false"},
        BadLine{
            "MarksDisagree",
            R"({"messages": [{"role": "assistant", "content": "x", "weight": 1, "train": false}]})",
            "'weight' says that the loss counts 1 times, 'train' says 0 times"},
        BadLine{
            "TrainDetail",
            R"({"messages": [{"role": "assistant", "content": "x", "train_detail": [{"train": true}]}]})",
            "train_detail': is not supported"},
        BadLine{
            "ReservedVariable",
            R"({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tools": []}})",
            "field 'chat_template_kwargs.tools'"},
        BadLine{"FewerLabels", R"({"input_ids": [1, 2], "labels": [1]})",
                "has 1 entries but 'input_ids' has 2"},
        BadLine{"NegativeLabel", R"({"input_ids": [1], "labels": [-1]})",
                "field 'labels[0]': is -1"}),
    ParameterName());

TEST(Row, IsNotReadWhenNestedTooDeep) {
  const std::string deep =
      "{\"text\": " + std::string(100'000, '[') + std::string(100'000, ']') + "}";
  EXPECT_THAT(complaint(deep), HasSubstr("nested deeper than 100"));
  const std::string tools(5000, '[');
  EXPECT_THAT(
      complaint(R"({"messages": [{"role": "user", "content": "x"}], "tools": ")" + tools + "\"}"),
      ::testing::AllOf(HasSubstr("field 'tools'"), HasSubstr("nested deeper")));
  // Brackets inside a string are text.
  EXPECT_EQ(parse("{\"text\": \"" + std::string(5000, '[') + "\\\"[\"}").text.size(), 5002u);
}

TEST(JsonlReader, GoesOnAfterABadLine) {
  const TemporaryDirectory folder;
  std::ofstream(folder / "a.jsonl")
      << "{\"text\": \"x\"}\n\n{\"text\": }\n{\"text\": \"z\", \"id\": 9}\n";
  JsonlReader reader(folder / "a.jsonl");
  EXPECT_EQ(reader.next()->row.text, "x");
  EXPECT_THAT(message_of([&] { reader.next(); }), HasSubstr("a.jsonl:3: not valid JSON"));
  const auto last = reader.next();
  EXPECT_EQ(last->row.text, "z");
  EXPECT_EQ(last->value["id"], 9);
  EXPECT_EQ(last->line, 4);
  EXPECT_FALSE(reader.next());
}

}  // namespace
}  // namespace heddle::data
