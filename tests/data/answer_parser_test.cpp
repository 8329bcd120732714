// An assistant's text taken apart again: what chat templates render comes back, however the text is
// split.
#include "data/answer/answer_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

#include "base/files.h"
#include "data/answer/answer_format.h"
#include "data/jinja/chat_template.h"
#include "data/json/json_text.h"
#include "testing/paths.h"

namespace heddle::data {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

const Json kTools = Json::parse(R"json([
  {"type": "function", "function": {"name": "find", "description": "d", "parameters": {"type": "object", "properties": {
     "text": {"type": "string"}, "count": {"type": "integer"}, "scale": {"type": "number"}, "exact": {"type": "boolean"},
     "tags": {"type": "array", "items": {"type": "string"}}, "options": {"type": "object"},
     "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "either": {"type": ["integer", "string"]}}}}},
  {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}}])json");

AnswerFormat format_with(CallSyntax calls, bool has_reasoning = true) {
  return {has_reasoning, calls};
}

AnswerDelta parse(const AnswerFormat& format, bool in_reasoning,
                  std::initializer_list<std::string_view> pieces) {
  AnswerParser parser(format, in_reasoning, kTools);
  AnswerDelta sum;
  for (const std::string_view piece : pieces) sum += parser.push(piece);
  return sum += parser.finish();
}

bool same(const AnswerDelta& a, const AnswerDelta& b) {
  return a.reasoning == b.reasoning && a.content == b.content && a.calls == b.calls;
}

/// The answer of the whole text; fails where a split of the text in two or into bytes gives
/// another.
AnswerDelta parse_split(const AnswerFormat& format, bool in_reasoning, std::string_view text) {
  const AnswerDelta whole = parse(format, in_reasoning, {text});
  for (std::size_t i = 1; i < text.size(); ++i) {
    EXPECT_TRUE(same(parse(format, in_reasoning, {text.substr(0, i), text.substr(i)}), whole))
        << "split at byte " << i << " of: " << text;
  }
  AnswerParser parser(format, in_reasoning, kTools);
  AnswerDelta bytes;
  for (const char byte : text) bytes += parser.push(std::string_view(&byte, 1));
  EXPECT_TRUE(same(bytes += parser.finish(), whole)) << "byte by byte: " << text;
  return whole;
}

/// Random answers whose texts hold much of what could mislead a parser.
class Answers {
 public:
  explicit Answers(std::uint64_t seed) : random_(seed) {}

  Json make(bool with_reasoning) {
    Json message = {{"role", "assistant"}, {"content", chance(4) ? "" : text()}};
    if (with_reasoning && chance(2)) message["reasoning_content"] = text();
    const int calls = pick(4);
    for (int i = 0; i < calls; ++i) {
      const Json function = chance(5) ? Json{{"name", "now"}, {"arguments", Json::object()}}
                                      : Json{{"name", "find"}, {"arguments", arguments()}};
      message["tool_calls"].push_back({{"type", "function"}, {"function", function}});
    }
    return message;
  }

 private:
  int pick(int count) { return static_cast<int>(random_() % static_cast<unsigned>(count)); }
  bool chance(int of) { return pick(of) == 0; }
  std::string word() {
    static const std::vector<std::string> words = {
        "alpha", "<",    "</",   "<tool",       "\n",         "\n\n",    "  ",    "\"q\"",
        "\\n",   "日本", "🙂", "</parameter", "{\"a\":",    "}",       "<b>",   "</th",
        "[1]",   "7",    "True", "&amp;",       "<parameter", "<tool_c", "<think"};
    return words[static_cast<std::size_t>(pick(static_cast<int>(words.size())))];
  }
  /// Neither empty nor with white space at its ends, which templates trim.
  std::string text() {
    std::string made = "A";
    for (int i = pick(6); i > 0; --i) made += word();
    return made + "z";
  }
  Json arguments() {
    Json made = Json::object();
    if (chance(2)) made["text"] = chance(3) ? word() + text() + word() : word();
    if (chance(3)) made["text"] = "see </tool_call> and <tool_call> and </parameter> here";
    if (chance(3)) made["count"] = pick(100000) - 50000;
    if (chance(3)) made["scale"] = static_cast<double>(pick(1000)) / 8;
    if (chance(3)) made["exact"] = chance(2);
    if (chance(3)) made["tags"] = {word(), text()};
    if (chance(3)) made["options"] = {{"deep", {{"x", word()}, {"y", nullptr}}}};
    if (chance(3)) made["limit"] = chance(2) ? Json(nullptr) : Json(pick(9));
    if (chance(3)) made["either"] = chance(2) ? Json("five") : Json(5);
    return made;
  }

  std::mt19937_64 random_;
};

/// The template's text for `answer` after the generation prompt, and that prompt.
std::pair<std::string, std::string> rendered(const ChatTemplate& chat, const Json& answer,
                                             const Json& variables) {
  ChatTemplate::Options options;
  options.tools = kTools;
  options.variables = variables;
  Json messages = Json::array({{{"role", "user"}, {"content", "q"}}});
  options.add_generation_prompt = true;
  std::string prompt = chat.render(messages, options).text;
  messages.push_back(answer);
  options.add_generation_prompt = false;
  std::string whole = chat.render(messages, options).text;
  // A template may begin a turn with calls without the line break of the generation prompt.
  while (!whole.starts_with(prompt)) prompt.pop_back();
  std::string written = whole.substr(prompt.size());
  written.erase(written.rfind("<|im_end|>"));
  return {prompt, written};
}

void expect_round_trip(const std::string& template_path, bool with_reasoning, const Json& variables,
                       std::uint64_t seed) {
  const std::string source = files::read(heddle::testing::source_path(template_path));
  const ChatTemplate chat = ChatTemplate::parse(source, template_path);
  const AnswerFormat format = answer_format_of(source);
  Answers answers(seed);
  for (int i = 0; i < 80; ++i) {
    const Json answer = answers.make(with_reasoning);
    const auto [prompt, written] = rendered(chat, answer, variables);
    const AnswerDelta parsed = parse_split(format, opens_reasoning(prompt), written);
    EXPECT_EQ(parsed.content, answer["content"]) << written;
    EXPECT_EQ(parsed.reasoning, answer.value("reasoning_content", "")) << written;
    const Json calls = answer.value("tool_calls", Json::array());
    ASSERT_EQ(parsed.calls.size(), calls.size()) << written;
    for (std::size_t c = 0; c < calls.size(); ++c) {
      EXPECT_EQ(parsed.calls[c].name, calls[c]["function"]["name"]);
      EXPECT_EQ(Json::parse(parsed.calls[c].arguments), calls[c]["function"]["arguments"])
          << written;
    }
  }
}

TEST(AnswerParser, RoundTripOfXmlCallsWithThinkingOpenedByThePrompt) {
  expect_round_trip("examples/tokenizer-4k/chat_template.jinja", true, {{"enable_thinking", true}},
                    1);
}

TEST(AnswerParser, RoundTripOfXmlCallsWithThinkingSwitchedOff) {
  expect_round_trip("examples/tokenizer-4k/chat_template.jinja", false,
                    {{"enable_thinking", false}}, 2);
}

TEST(AnswerParser, RoundTripOfXmlCallsWithValuesAsPythonPrintsThem) {
  expect_round_trip("tests/interop/text/templates/xml-tools.jinja", false, Json::object(), 3);
}

TEST(AnswerParser, RoundTripOfJsonCalls) {
  expect_round_trip("tests/interop/text/templates/json-calls.jinja", false, Json::object(), 4);
}

TEST(AnswerParser, UnterminatedCallIsContent) {
  const std::string text = "Let me see.\n\n<tool_call>\n<function=find>\n<parameter=text>\nhalf";
  const AnswerDelta parsed = parse_split(format_with(CallSyntax::kXml), false, text);
  EXPECT_EQ(parsed.content, text);
  EXPECT_THAT(parsed.calls, IsEmpty());
}

TEST(AnswerParser, UnreadableCallIsContentAndLaterCallsAreCalls) {
  const AnswerDelta parsed = parse_split(
      format_with(CallSyntax::kJson), false,
      "<tool_call>\n{\"name\": 5}\n</tool_call>\n<tool_call>{\"name\": \"now\"}</tool_call>");
  EXPECT_EQ(parsed.content, "<tool_call>\n{\"name\": 5}\n</tool_call>");
  EXPECT_THAT(parsed.calls, ElementsAre(ToolCall{"now", "{}"}));
}

TEST(AnswerParser, MentionedTagIsContentAtOnce) {
  AnswerParser parser(format_with(CallSyntax::kXml), false, kTools);
  EXPECT_EQ(parser.push("Write <tool_call> for").content, "Write <tool_call> for");
}

TEST(AnswerParser, TextBetweenAndAfterCallsIsKept) {
  const AnswerDelta parsed = parse_split(
      format_with(CallSyntax::kJson), false,
      "First\n<tool_call>{\"name\": \"now\"}</tool_call>\nthen\n\n"
      "<tool_call>{\"name\": \"find\", \"arguments\": {\"count\": 12345678901234567890123}}"
      "</tool_call>\n\nlast \n");
  EXPECT_EQ(parsed.content, "First\nthen\n\nlast \n");
  EXPECT_THAT(parsed.calls, ElementsAre(ToolCall{"now", "{}"},
                                        ToolCall{"find", R"({"count":12345678901234567890123})"}));
}

TEST(AnswerParser, ValueThatDoesNotFitItsTypeIsAString) {
  const AnswerDelta parsed =
      parse_split(format_with(CallSyntax::kXml), false,
                  "<tool_call>\n<function=find>\n<parameter=count>\nmany\n</parameter>\n"
                  "<parameter=text>\n\n 7 \n\n</parameter>\n<parameter=unknown>\n7\n</parameter>\n"
                  "</function>\n</tool_call>");
  EXPECT_THAT(parsed.calls,
              ElementsAre(ToolCall{"find", R"({"count":"many","text":"\n 7 \n","unknown":"7"})"}));
}

TEST(AnswerParser, ReasoningThatNeverEndsIsReasoning) {
  const AnswerDelta parsed =
      parse_split(format_with(CallSyntax::kXml), true, "\nHmm, <tool_call> \n");
  EXPECT_EQ(parsed.reasoning, "Hmm, <tool_call>");
  EXPECT_EQ(parsed.content, "");
}

TEST(AnswerParser, ThinkingThatTheModelOpensItself) {
  const AnswerDelta parsed = parse_split(format_with(CallSyntax::kNone), false,
                                         "<think>\nWhy?\n\nSo.\n</think>\n\n Yes. \n");
  EXPECT_EQ(parsed.reasoning, "Why?\n\nSo.");
  EXPECT_EQ(parsed.content, " Yes. \n");
}

TEST(AnswerParser, WithoutFormatEverythingIsContent) {
  const std::string text = " \n<think>a</think><tool_call>{}</tool_call>\n";
  EXPECT_EQ(parse_split({}, false, text).content, text);
}

TEST(OpensReasoning, LooksAtTheLastTurnOnly) {
  EXPECT_TRUE(opens_reasoning("<|im_start|>assistant\n<think>\n"));
  EXPECT_FALSE(opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
  EXPECT_FALSE(opens_reasoning("<|im_start|>user\n<think>\n<|im_end|>\n<|im_start|>assistant\n"));
}

}  // namespace
}  // namespace heddle::data
