// Forms that the data sets of other trainers have, read as what they mean.
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data/json/json_text.h"
#include "data/readers/jsonl_reader.h"

namespace heddle::data {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Row parse(const std::string& line) { return parse_line(line, {"data.jsonl", 1}, {}); }
std::string messages_of(const std::string& line) { return json_text::dump(parse(line).messages); }

TEST(TokenRow, LeavesPaddingOut) {
  for (
      const char* line :
      {R"({"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "labels": [-100, 6, 7, -100, -100]})",
       R"({"input_ids": [0, 5, 6, 7], "attention_mask": [0, 1, 1, 1], "labels": [-100, -100, 6, 7]})",
       R"({"input_ids": [9, 5, 6, 7, 9], "attention_mask": [false, true, true, true, false],
               "labels": [9, -100, 6, 7, 9], "token_type_ids": [0, 0, 0, 0, 0]})",
       R"({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, 6, 7], "completion_mask": null})"}) {
    const Row row = parse(line);
    EXPECT_THAT(row.input_ids, ElementsAre(5, 6, 7)) << line;
    EXPECT_THAT(row.labels, ElementsAre(-100, 6, 7)) << line;
    EXPECT_THAT(row.loss_mask, IsEmpty()) << line;
  }
}

TEST(TokenRow, MasksOfLossMeet) {
  const std::string ids = R"({"input_ids": [5, 6, 7], )";
  for (const char* name : {"completion_mask", "assistant_masks", "assistant_mask", "loss_mask"}) {
    EXPECT_THAT(parse(ids + '"' + name + R"(": [0, 1, 1]})").loss_mask,
                ElementsAre(false, true, true))
        << name;
  }
  EXPECT_THAT(
      parse(ids + R"("completion_mask": [0, 1, 1], "assistant_masks": [1, 0, 1]})").loss_mask,
      ElementsAre(false, false, true));
  EXPECT_THAT(
      parse(ids + R"("completion_mask": [0, 1, 0], "attention_mask": [1, 1, 0]})").loss_mask,
      ElementsAre(false, true));
}

TEST(TokenRow, PackedSequencesComeApart) {
  for (const char* packed :
       {R"("seq_lengths": [2, 1, 3])", R"("position_ids": [0, 1, 0, 0, 1, 2])"}) {
    const std::vector<Row> rows =
        sequences(parse(R"({"input_ids": [1, 2, 3, 4, 5, 6], "labels": [1, 2, -100, 4, 5, 6], )" +
                        std::string(packed) + "}"));
    ASSERT_EQ(rows.size(), 3u) << packed;
    EXPECT_THAT(rows[0].input_ids, ElementsAre(1, 2));
    EXPECT_THAT(rows[1].labels, ElementsAre(-100));
    EXPECT_THAT(rows[2].input_ids, ElementsAre(4, 5, 6));
  }
  EXPECT_EQ(sequences(parse(R"({"input_ids": [1, 2], "seq_lengths": [2]})")).size(), 1u);
}

TEST(ToolCalls, HaveOneForm) {
  const std::string expected =
      R"([{"role":"user","content":"w"},{"role":"assistant","content":"","tool_calls":[{"type":"function",)"
      R"("function":{"name":"get","arguments":{"city":"A"}}}]},{"role":"tool","content":"3"},)"
      R"({"role":"assistant","content":"ok"}])";
  // LLaMA-Factory, ms-swift, and both in the other's fields.
  const std::string call = R"("{\"name\": \"get\", \"arguments\": {\"city\": \"A\"}}")";
  for (const char* names :
       {"function_call observation", "tool_call tool_response", "tool_calls function_response"}) {
    const std::string both = names;
    const std::string calls = both.substr(0, both.find(' ')),
                      answers = both.substr(both.find(' ') + 1);
    EXPECT_EQ(messages_of(R"({"conversations": [{"from": "human", "value": "w"}, {"from": ")" +
                          calls + R"(", "value": )" + call + R"(}, {"from": ")" + answers +
                          R"(", "value": "3"}, {"from": "gpt", "value": "ok"}]})"),
              expected);
    EXPECT_EQ(messages_of(R"({"messages": [{"role": "user", "content": "w"}, {"role": ")" + calls +
                          R"(", "content": )" + call + R"(}, {"role": ")" + answers +
                          R"(", "content": "3"}, {"role": "assistant", "content": "ok"}]})"),
              expected);
  }
  // Calls after each other, and after a text, are one turn.
  EXPECT_EQ(
      messages_of(R"({"messages": [{"role": "user", "content": "w"},
      {"role": "assistant", "content": "I look."}, {"role": "tool_call", "content": "{\"name\": \"f\"}"},
      {"role": "tool_call", "content": "{\"name\": \"g\"}"}]})"),
      R"([{"role":"user","content":"w"},{"role":"assistant","content":"I look.","tool_calls":[)"
      R"({"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"g"}}]}])");
  // OpenAI's older form.
  const Row old = parse(R"({"messages": [{"role": "user", "content": "w"},
      {"role": "assistant", "content": null, "function_call": {"name": "get", "arguments": "{}"}},
      {"role": "function", "name": "get", "content": "3"}], "functions": [{"name": "get"}]})");
  EXPECT_EQ(
      old.messages[1].dump(),
      R"({"role":"assistant","tool_calls":[{"type":"function","function":{"name":"get","arguments":"{}"}}]})");
  EXPECT_EQ(old.messages[2]["role"], "tool");
  EXPECT_EQ(old.tools.dump(), R"([{"type":"function","function":{"name":"get"}}])");
  EXPECT_EQ(
      parse(R"({"messages": [{"role": "user", "content": "w"}], "tools": ["{\"name\": \"f\"}"]})")
          .tools.dump(),
      R"([{"name":"f"}])");
}

TEST(Turns, MarksOfLossAreRead) {
  for (const char* mark : {R"("weight": 0)", R"("loss": false)", R"("train": false)",
                           R"("loss": 0)", R"("weight": 0, "train": null, "loss": false)"}) {
    for (const char* turn : {R"({"messages": [{"role": "assistant", "content": "x", )",
                             R"({"conversations": [{"from": "gpt", "value": "x", )"}) {
      const Row row = parse(std::string(turn) + mark + "}]}");
      EXPECT_EQ(row.message_weights[0], 0) << mark;
      EXPECT_EQ(row.messages[0].dump(), R"({"role":"assistant","content":"x"})") << mark;
    }
  }
  const Row row = parse(R"({"messages": [{"role": "user", "content": "q", "loss": true},
      {"role": "tool_call", "content": "{\"name\": \"f\"}", "loss": false},
      {"role": "tool", "content": "3", "train": false}, {"role": "assistant", "content": "x", "loss": true}]})");
  EXPECT_TRUE(std::isnan(row.message_weights[0]));
  EXPECT_THAT(std::vector(row.message_weights.begin() + 1, row.message_weights.end()),
              ElementsAre(0, 0, 1));
}

TEST(Turns, NullsAreNothing) {
  EXPECT_EQ(
      messages_of(
          R"({"messages": [{"role": "user", "name": null, "content": "q", "tool_calls": null},
      {"role": "assistant", "content": null, "reasoning_content": null}, {"role": "tool", "content": null},
      {"role": "tool"}]})"),
      R"([{"role":"user","content":"q"},{"role":"assistant"},{"role":"tool"},{"role":"tool"}])");
  for (const char* medium : {R"("image": null)", R"("image_url": {"url": null, "detail": null})",
                             R"("video": [], "audio": "", "image": [null])"}) {
    EXPECT_EQ(
        messages_of(
            R"({"images": [null], "messages": [{"role": "user", "content": [{"type": "text", "text": "q", )" +
            std::string(medium) + "}]}]}"),
        R"([{"role":"user","content":[{"type":"text","text":"q"}]}])")
        << medium;
  }
}

TEST(Rows, VariablesOfTheTemplate) {
  const std::string row =
      R"({"messages": [{"role": "user", "content": "q"}], "chat_template_kwargs": )";
  EXPECT_EQ(parse(row + R"({"enable_thinking": false, "n": 2}})").template_variables.dump(),
            R"({"enable_thinking":false,"n":2})");
  EXPECT_EQ(parse(row + R"("{\"enable_thinking\": false}"})").template_variables.dump(),
            R"({"enable_thinking":false})");
  EXPECT_TRUE(parse(row + "null}").template_variables.is_null());
}

TEST(JsonText, KeepsIntegersOfAnySize) {
  for (const char* text :
       {R"({"wei":1000000000000000000000,"n":-9223372036854775809})", "[18446744073709551616]",
        R"({"a":[9223372036854775808,-9223372036854775808,123456789012345678901234567890]})",
        R"({"float":1e+21,"text":"1000000000000000000000","nothing":null})"}) {
    EXPECT_EQ(json_text::dump(json_text::parse(text)), text);
  }
  std::string keys = "{";
  for (int i = 0; i < 100'000; ++i) keys += fmt::format("\"k{}\":{},", i, i);
  keys.back() = '}';
  EXPECT_EQ(json_text::dump(json_text::parse(keys)), keys);
}

}  // namespace
}  // namespace heddle::data
