#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include "base/errors.h"
#include "base/files.h"
#include "data/jinja/chat_template.h"
#include "data/json/json_text.h"
#include "testing/paths.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;

std::string error_of(const std::string& source, const ordered_json& variables = nullptr) {
  try {
    ChatTemplate::Options options;
    options.variables = variables;
    options.max_steps = 1'000'000;
    options.max_bytes = 1 << 24;
    const auto rendered = ChatTemplate::parse(source, "chat.jinja")
                              .render({{{"role", "user"}, {"content", "Hi"}}}, options);
    return "no error but: " + rendered.text;
  } catch (const DataError& error) {
    return error.what();
  }
}

ChatTemplate::Rendered render(const std::string& source, const ordered_json& messages,
                              const ordered_json& variables = nullptr) {
  ChatTemplate::Options options;
  options.variables = variables;
  return ChatTemplate::parse(source, "chat.jinja").render(messages, options);
}

void expect_as_golden(const ordered_json& golden, const std::string& source,
                      const ordered_json& messages, const ChatTemplate::Options& options) {
  try {
    const auto rendered = ChatTemplate::parse(source, "golden").render(messages, options);
    ASSERT_TRUE(golden.contains("text"))
        << source << "\nraises in Python: " << golden["error"] << "\nbut gives " << rendered.text;
    EXPECT_EQ(rendered.text, golden["text"].get<std::string>()) << source;
    EXPECT_EQ(ordered_json(rendered.generation_spans), golden["spans"]) << source;
  } catch (const DataError& error) {
    EXPECT_TRUE(golden.contains("error")) << source << "\n" << error.what();
  }
}

// Expected texts come from transformers: tests/interop/text/make_golden.py.
TEST(ChatTemplate, ConstructsRenderAsInTransformers) {
  const auto golden =
      ordered_json::parse(files::read(testing::source_path("tests/data/jinja_golden.json")));
  ASSERT_GT(golden["cases"].size(), 500u);
  ChatTemplate::Options options;
  options.variables = golden["variables"];
  for (const auto& row : golden["cases"]) {
    expect_as_golden(row, row["template"], golden["messages"], options);
  }
}

TEST(ChatTemplate, ExampleTemplateRendersAsInTransformers) {
  const auto golden =
      ordered_json::parse(files::read(testing::source_path("tests/data/jinja_golden.json")));
  const std::string source =
      files::read(testing::source_path("examples/tokenizer-4k/chat_template.jinja"));
  for (const auto& row : golden["conversations"]) {
    ChatTemplate::Options options;
    options.tools = row["tools"];
    options.add_generation_prompt = row["prompt"];
    options.variables = row["variables"];
    expect_as_golden(row, source, row["messages"], options);
  }
}

TEST(ChatTemplate, GenerationSpansAreByteRangesOfTheAssistantsText) {
  const std::string source =
      "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
      "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
  const auto rendered = render(source, {{{"role", "user"}, {"content", "é"}},
                                        {{"role", "assistant"}, {"content", "日本"}},
                                        {{"role", "assistant"}, {"content", ""}}});
  ASSERT_EQ(rendered.generation_spans.size(), 2u);
  const auto [begin, end] = rendered.generation_spans[0];
  EXPECT_EQ(rendered.text.substr(begin, end - begin), "日本");
  EXPECT_EQ(rendered.generation_spans[1].first, rendered.generation_spans[1].second);
  EXPECT_TRUE(ChatTemplate::parse(source, "t").has_generation_blocks());
  EXPECT_FALSE(ChatTemplate::parse("{{ x }}", "t").has_generation_blocks());
}

TEST(ChatTemplate, ReasoningIsFoundUnderItsOtherNames) {
  const std::string source = "{{ messages[0].reasoning_content }}/{{ messages[0].thinking }}";
  for (const char* name : {"reasoning", "thinking", "reasoning_content"}) {
    EXPECT_EQ(render(source, {{{"role", "assistant"}, {name, "r"}}}).text, "r/r") << name;
  }
  EXPECT_EQ(render(source, {{{"role", "assistant"}}}).text, "/");
}

TEST(ChatTemplate, ErrorsNameTemplateLineAndConstruct) {
  EXPECT_EQ(error_of("a\n{% include 'x' %}"),
            "chat.jinja:2: the statement 'include' is not supported");
  EXPECT_EQ(error_of("{{ 'a' |\n pprint }}"), "chat.jinja:2: filter 'pprint' is not supported");
  EXPECT_EQ(error_of("\n\n{{ x is nonsense }}"), "chat.jinja:3: test 'nonsense' is not supported");
  EXPECT_EQ(error_of("{% for x in y recursive %}{% endfor %}"),
            "chat.jinja:1: a recursive loop is not supported");
  EXPECT_EQ(error_of("\n{{ raise_exception('Roles must alternate') }}"),
            "chat.jinja:2: raise_exception: Roles must alternate");
  EXPECT_EQ(error_of("{{ messages[0].content.name.first }}"),
            "chat.jinja:1: a value has no attribute or key 'name'");
  EXPECT_EQ(error_of("a\nb {{ missing.x }}"), "chat.jinja:2: 'missing' is undefined");
  EXPECT_THAT(error_of("{% if x %}\n\n"),
              HasSubstr("chat.jinja:2: the block that begins on line 1 is not closed"));
  EXPECT_THAT(error_of("{% set x %}{% generation %}{% endgeneration %}{% endset %}"),
              HasSubstr("generation block inside a macro"));
  EXPECT_THAT(error_of("\xff"), HasSubstr("not valid UTF-8 at byte 0"));
  EXPECT_THAT(error_of("{{ 99999999999999999999 }}"), HasSubstr("cannot be read"));
  EXPECT_THAT(error_of("{{ x + 1 }}", {{"x", 18446744073709551615ull}}),
              HasSubstr("18446744073709551615 needs more than 64 bits to be calculated with"));
}

// Expected texts are those of Python.
TEST(ChatTemplate, IntegersOfAnySizeStayAsTheyAre) {
  const ordered_json big = json_text::parse(
      R"({"a": 1000000000000000000000, "b": -9223372036854775809, "c": 9223372036854775808})");
  const auto text = [&](const char* source) {
    return render(source, ordered_json::array(), big).text;
  };
  EXPECT_EQ(text("{{ a }} {{ [a, b] }} {{ {'x': c} | tojson }} {{ a | string }} {{ '%d' % b }}"),
            "1000000000000000000000 [1000000000000000000000, -9223372036854775809] "
            "{\"x\": 9223372036854775808} 1000000000000000000000 -9223372036854775809");
  EXPECT_EQ(
      text("{{ a > c }} {{ b < a }} {{ c == c }} {{ a == 1 }} {{ a is integer }} {{ a is number "
           "}} {{ not a }} {{ -b }} {{ b | abs }} {{ '  +001000000000000000000000' | int }} "
           "{{ a | float }} {{ [a, 3, b] | sort }} {{ 3 < b }} {{ a in [1, a] }}"),
      "True True True False True True False 9223372036854775809 9223372036854775809 "
      "1000000000000000000000 1e+21 [-9223372036854775809, 3, 1000000000000000000000] False "
      "True");
}

TEST(ChatTemplate, UnknownFiltersAndTestsMatterWhereTheyAreUsed) {
  for (const char* source :
       {"{% if x is defined %}{{ x | from_json }}{% endif %}ok",
        "{{ 'ok' if true else x | fromjson }}", "{% macro m(x) %}{{ x is json }}{% endmacro %}ok",
        "{% for m in [] %}{{ m | strip_tags | nonsense }}{% endfor %}ok"}) {
    EXPECT_EQ(render(source, ordered_json::array()).text, "ok") << source;
  }
}

// A long conversation costs what its length demands, whatever a template looks at for each message.
TEST(ChatTemplate, LongConversationsRender) {
  const std::string habits =
      "{% for m in messages %}{% if tools is not none and loop.index0 == messages | length - 1 "
      "%}{% endif %}{% if messages[0].role == 'system' or messages | first == 3 or (messages | "
      "last).role == '' %}!{% endif %}{{ m.content }}{% endfor %}";
  for (const int count : {1000, 5000, 20'000}) {
    ordered_json messages = ordered_json::array(), tools = ordered_json::array();
    for (int i = 0; i < count; ++i)
      messages.push_back({{"role", i % 2 ? "assistant" : "user"}, {"content", "x"}});
    for (int i = 0; i < 2000; ++i) tools.push_back({{"name", "f"}, {"description", "does f"}});
    ChatTemplate::Options options;
    options.tools = tools;
    EXPECT_EQ(ChatTemplate::parse(habits, "t").render(messages, options).text.size(), count);
  }
  // Text that is gathered turn by turn.
  ordered_json messages = ordered_json::array();
  for (int i = 0; i < 1000; ++i)
    messages.push_back({{"role", "user"}, {"content", std::string(999, 'x')}});
  EXPECT_EQ(
      render("{% set n = namespace(t='') %}{% for m in messages %}{% set n.t = n.t ~ m.content "
             "%}{% endfor %}{{ n.t }}",
             messages)
          .text.size(),
      999'000u);
}

TEST(ChatTemplate, MessagesMustBeAListOfObjects) {
  const auto chat = ChatTemplate::parse("", "chat.jinja");
  EXPECT_THROW(chat.render(ordered_json::object(), {}), DataError);
  EXPECT_THROW(chat.render({"text"}, {}), DataError);
  EXPECT_EQ(chat.render(ordered_json::array(), {}).text, "");
}

// Names and keys are found without a scan for each.
TEST(ChatTemplate, ManyNamesAndKeysTakeLinearTime) {
  constexpr int kMany = 20'000;
  std::string sets, reads;
  for (int i = 0; i < kMany; ++i) {
    sets += "{% set v" + std::to_string(i) + "=1 %}";
    reads += "{{u" + std::to_string(i) + "}}";
  }
  nlohmann::json keys = nlohmann::json::object();
  for (int i = 0; i < 300'000; ++i) keys["u" + std::to_string(i)] = i % 10;
  const ordered_json many = json_text::parse(keys.dump());
  ordered_json message = many;
  message["role"] = "assistant";
  message["reasoning"] = "r";
  const std::clock_t begin = std::clock();  // of the processor: machines may be busy
  const auto text_of = [](const std::string& source, const ordered_json& messages,
                          const ordered_json& variables = {}) {
    ChatTemplate::Options options;
    options.variables = variables;
    return ChatTemplate::parse(source, "t").render(messages, options).text;
  };
  const ordered_json none = ordered_json::array();
  EXPECT_EQ(text_of(sets + "{% for i in range(9999) %}{{v0}}{{v19999}}{% endfor %}", none).size(),
            2 * 9999u);
  EXPECT_EQ(text_of(reads, none, many).size(), std::size_t{kMany});
  EXPECT_EQ(
      text_of("{{ messages[0].u77 }}{{ messages[0].thinking }}", ordered_json::array({message})),
      "7r");
  EXPECT_EQ(text_of("{{ messages[0].reasoning_content }}", ordered_json::array({message})), "r");
  EXPECT_EQ(text_of("{{ u299999 }}{{ u300000 is defined }}", none, many), "9False");
  EXPECT_LT(std::clock() - begin, 20 * CLOCKS_PER_SEC);
}

// Each would take for ever, or all memory, or the stack, without a bound.
TEST(ChatTemplate, HostileTemplatesEndWithAnError) {
  const std::string loops =
      "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
  EXPECT_THAT(error_of(loops), HasSubstr("steps"));
  EXPECT_THAT(error_of("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
              HasSubstr("nested evaluations"));
  EXPECT_THAT(error_of("{{ 'x' * 99999999999 }}"), HasSubstr("bytes"));
  EXPECT_THAT(error_of("{% set d = namespace(v={}) %}{% for i in range(99999) %}{% set d.v = "
                       "dict(d.v, **{i | string: i}) %}{% endfor %}"),
              HasSubstr("steps"));
  EXPECT_THAT(
      error_of("{% set x = dict(('ab' * 9999) | batch(2)) %}{% for i in range(99999) %}{% set "
               "y = dict(x.items() | list + range(1000) | map('string') | batch(2) | list) "
               "%}{% endfor %}"),
      HasSubstr("steps"));
  EXPECT_THAT(error_of("{{ ('x' * 9999999) | join(',') }}"), HasSubstr("steps"));
  EXPECT_THAT(error_of("{{ ','.join('x' * 9999999) }}"), HasSubstr("steps"));
  EXPECT_THAT(error_of("{{ ('x' * 9999999) | list | length }}"), HasSubstr("steps"));
  EXPECT_THAT(error_of("{{ ('a' * 999999).find('a' * 499999 ~ 'b') }}"), HasSubstr("steps"));
  EXPECT_THAT(error_of("{{ ('a' * 499999 ~ 'b') in ('a' * 999999) }}"), HasSubstr("steps"));
  EXPECT_THAT(error_of("{% set s = 'x' * 99999 %}{% for i in range(99999) %}{% if s is lower "
                       "%}{% endif %}{% endfor %}"),
              HasSubstr("steps"));
  EXPECT_THAT(
      error_of("{% set a = ['x' * 99999] * 99 %}{% set b = ['x' * 99998 ~ 'x'] * 99 %}{% for i "
               "in range(99999) %}{% if a == b %}{% endif %}{% endfor %}"),
      HasSubstr("steps"));
  EXPECT_THAT(error_of("{% set n = namespace(x='xxxxxxxx') %}{% for i in range(99) %}{% set n.x = "
                       "n.x ~ n.x %}{% endfor %}"),
              HasSubstr("bytes"));
  EXPECT_THAT(error_of("{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, "
                       "n.x] %}{% endfor %}"),
              HasSubstr("values"));
  EXPECT_THAT(error_of("{% set n = namespace(x=[1]) %}{% for i in range(9999) %}{% set n.x = [n.x] "
                       "%}{% endfor %}"),
              HasSubstr("nested deeper"));
  EXPECT_THAT(error_of("{{ " + std::string(100000, '(') + "1" + std::string(100000, ')') + " }}"),
              HasSubstr("nested"));
  EXPECT_THAT(error_of("{{ " + std::string(100000, '[') + std::string(100000, ']') + " }}"),
              HasSubstr("nested"));
  std::string sum = "{{ 1", nots = "{{ ", ifs;
  for (int i = 0; i < 5000; ++i) {
    sum += "+1";
    nots += "not ";
    ifs += "{% if x %}";
  }
  EXPECT_THAT(error_of(sum + " }}"), HasSubstr("steps"));
  EXPECT_THAT(error_of(nots + "1 }}"), HasSubstr("nested"));
  EXPECT_THAT(error_of(ifs), HasSubstr("nested"));
  ordered_json deep = 1;
  for (int i = 0; i < 500; ++i) deep = ordered_json::array({deep});
  EXPECT_THAT(error_of("", {{"x", deep}}), HasSubstr("nested deeper"));
}

// A template is shared by the threads that prepare data.
TEST(ChatTemplate, RendersFromSeveralThreads) {
  const auto chat =
      ChatTemplate::parse("{% for m in messages %}{{ m.content * 3 }}{% endfor %}", "t");
  std::vector<std::string> texts(64);
  std::vector<std::thread> threads;
  for (int first = 0; first < 4; ++first) {
    threads.emplace_back([&, first] {
      for (int i = first; i < 64; i += 4)
        texts[i] = chat.render({{{"role", "user"}, {"content", std::to_string(i)}}}, {}).text;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 64; ++i) {
    const std::string one = std::to_string(i);
    EXPECT_EQ(texts[i], one + one + one);
  }
}

}  // namespace
}  // namespace heddle::data
