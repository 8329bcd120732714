// All turns told at once are those that are told one by one, which render the conversation for
// each.
#include "data/rendering/assistant_spans.h"

#include <limits>
#include <random>
#include <regex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/files.h"
#include "loader_fixture.h"
#include "testing/paths.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

std::string without_generation_blocks(std::string source) {
  return std::regex_replace(source, std::regex(R"(\{%-? (end)?generation -?%\})"), "");
}

std::string read(const std::string& path) {
  return without_generation_blocks(files::read(heddle::testing::source_path(path)));
}

struct Named {
  std::string name, source;
  bool at_once = true;  ///< Whether two renderings tell all turns.
};

/// Templates of the tree, and small ones with habits that others have.
std::vector<Named> templates() {
  const std::string loop =
      "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}";
  const std::string prompt = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}";
  return {
      {"chatml", testing::chatml_template()},
      {"thinking", testing::thinking_template()},
      {"json-calls", read("tests/interop/text/templates/json-calls.jinja")},
      {"xml-tools", read("tests/interop/text/templates/xml-tools.jinja")},
      {"tokenizer-4k", read("examples/tokenizer-4k/chat_template.jinja")},
      // The text ends after the last turn, within the loop or after it.
      {"end in loop",
       loop + "{{- '<|im_end|>' }}{%- if loop.last %}{{- '<|endoftext|>' }}{%- endif %}" +
           "{%- endfor %}" + prompt + "{%- endif %}"},
      {"end after loop", loop + "{{- '<|im_end|>\n' }}{%- endfor %}" + prompt +
                             "{%- else %}{{- '<|endoftext|>' }}{%- endif %}"},
      // A turn's end is written when the next begins.
      {"late end",
       "{%- for m in messages %}{%- if not loop.first %}{{- '<|im_end|>\n' }}{%- endif %}"
       "{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}{%- endfor %}"
       "{{- '<|im_end|>\n' }}" +
           prompt + "{%- endif %}",
       false},
      // Messages written by a macro, and into a text that is written at the end.
      {"macro",
       "{%- macro show(m) %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + "
       "'<|im_end|>\n' }}{%- endmacro %}{%- for m in messages %}{{- show(m) }}{%- endfor %}" +
           prompt + "{%- endif %}"},
      {"collected",
       "{%- set ns = namespace(all='') %}{%- for m in messages %}{%- set ns.all = ns.all + "
       "'<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' %}{%- endfor %}"
       "{{- ns.all }}" +
           prompt + "{%- endif %}",
       false},
      // The assistant is not asked again after a tool's answer.
      {"no prompt after tools", loop + "{{- '<|im_end|>\n' }}{%- endfor %}" +
                                    "{%- if add_generation_prompt and messages[-1].role != 'tool' "
                                    "%}{{- '<|im_start|>assistant\n' }}{%- endif %}"},
      // Each turn is numbered, and a turn names the one before.
      {"numbered",
       "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + ' of ' + "
       "messages|length|string + '<|im_end|>\n' }}{%- endfor %}" +
           prompt + "{%- endif %}",
       false},
      {"names the turn before",
       "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
       "{%- if loop.previtem %}{{- '(' + (loop.previtem.content or '')[:3] + ')' }}{%- endif %}"
       "{{- '<|im_end|>\n' }}{%- endfor %}" +
           prompt + "{%- endif %}",
       false},
  };
}

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int below(int count) { return static_cast<int>(engine_() % static_cast<unsigned>(count)); }
  bool one_in(int count) { return below(count) == 0; }
  std::string text() {
    static const std::vector<std::string> kTexts = {"a word",
                                                    "two\n\nlines",
                                                    " space around \n",
                                                    "<|im_end|>",
                                                    "x",
                                                    "<think>",
                                                    "assistant",
                                                    "<|im_start|>assistant\n",
                                                    "{\"k\": 1}",
                                                    "tail\n",
                                                    "\u00e9\u4e16",
                                                    "<tool_call>",
                                                    "a",
                                                    "<think>\n\n</think>\n\n"};
    std::string text = kTexts[static_cast<std::size_t>(below(static_cast<int>(kTexts.size())))];
    return one_in(3) ? text + kTexts[static_cast<std::size_t>(below(5))] : text;
  }
  /// Questions and answers, with thinking, calls of tools, parts, an assistant that begins, two
  /// turns of it in a row: a share of conversations each.
  ordered_json conversation(int turns) {
    const bool thinks = one_in(2), calls = one_in(2), has_parts = one_in(4), is_odd = one_in(6);
    ordered_json list = ordered_json::array();
    const auto add = [&](const char* role, ordered_json content) {
      list.push_back({{"role", role}, {"content", std::move(content)}});
    };
    const auto content = [&]() -> ordered_json {
      if (!has_parts || !one_in(2)) return text();
      return ordered_json::array(
          {{{"type", "text"}, {"text", text()}}, {{"type", "text"}, {"text", text()}}});
    };
    if (one_in(3)) add("system", text());
    if (is_odd && one_in(2)) add("assistant", text());
    add("user", content());
    for (int said = 0; said < turns; ++said) {
      add("assistant", content());
      ordered_json& turn = list.back();
      if (thinks && one_in(2)) {
        if (turn["content"].is_string() && one_in(2)) {
          turn["content"] = "<think>\nso " + text() + "\n</think>\n\n" + text();
        } else {
          turn["reasoning_content"] = text();
        }
      }
      if (calls && one_in(2)) {
        turn["tool_calls"] = ordered_json::array();
        for (int i = below(2); i >= 0; --i) {
          turn["tool_calls"].push_back(
              {{"id", "c"},
               {"type", "function"},
               {"function", {{"name", "f"}, {"arguments", {{"x", text()}}}}}});
        }
        if (one_in(2)) turn["content"] = "";
        for (int i = 1 + below(2); i > 0; --i) add("tool", text());
        if (!one_in(4)) continue;
      }
      if (is_odd && one_in(4)) continue;
      add("user", content());
    }
    return list;
  }

 private:
  std::mt19937 engine_;
};

struct Found {
  std::vector<TextSpan> spans;
  std::string error;
};

Found find(const Chat& chat, const std::vector<std::string>& special, const ordered_json& messages,
           std::size_t many_turns) {
  ChatTemplate::Options options;
  options.variables = chat.variables();
  Found found;
  try {
    const ordered_json adapted = chat.adapted(messages);
    const ChatTemplate::Rendered full = chat.chat_template().render(adapted, options);
    found.spans = AssistantSpans(chat, special).find(adapted, options, full, many_turns);
  } catch (const DataError& error) {
    found.error = error.what();
  }
  return found;
}

const std::vector<std::string> kSpecial = {"<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>",
                                           "</think>"};

TEST(AssistantSpans, ToldAtOnceAreThoseToldOneByOne) {
  int compared = 0;
  for (const Named& named : templates()) {
    const Chat chat(named.source, named.name, ordered_json::object());
    for (unsigned seed = 0; seed < 150; ++seed) {
      Random random(seed);
      const ordered_json messages = random.conversation(1 + random.below(seed % 5 == 0 ? 60 : 12));
      const Found one_by_one = find(chat, kSpecial, messages, kNever);
      const Found at_once = find(chat, kSpecial, messages, 1);
      ASSERT_EQ(at_once.error.empty(), one_by_one.error.empty())
          << named.name << " seed " << seed << ": '" << at_once.error << "' '" << one_by_one.error
          << "'\n"
          << messages.dump(1);
      ASSERT_EQ(at_once.spans, one_by_one.spans) << named.name << " seed " << seed << "\n"
                                                 << messages.dump(1);
      compared += one_by_one.error.empty();
    }
  }
  EXPECT_GT(compared, 1000);
}

/// Templates whose turns the two renderings tell alone take no rendering of a turn but the samples:
/// time grows with the conversation.
TEST(AssistantSpans, TwoRenderingsTellAllTurns) {
  for (const Named& named : templates()) {
    if (!named.at_once) continue;
    const Chat chat(named.source, named.name, ordered_json::object());
    ChatTemplate::Options options;
    options.variables = chat.variables();
    const auto render = [&](const ordered_json& messages) {
      return chat.chat_template().render(chat.adapted(messages), options);
    };
    const ordered_json question = {{"role", "user"}, {"content", "x"}};
    options.add_generation_prompt = true;
    std::string prompt = render(ordered_json::array({question})).text;
    prompt.erase(0, prompt.rfind("<|im_start|>"));
    options.add_generation_prompt = false;

    ordered_json messages = ordered_json::array({question});
    std::vector<std::size_t> turns;
    for (int i = 0; i < 40; ++i) {
      turns.push_back(messages.size());
      messages.push_back({{"role", "assistant"}, {"content", "answer " + std::to_string(i)}});
      messages.push_back({{"role", "user"}, {"content", "question " + std::to_string(i)}});
    }
    ordered_json marked = messages;
    for (const std::size_t turn : turns)
      marked[turn] = turn_segments::marked_message(messages[turn]);
    const auto spans =
        turn_segments::spans_of(messages, turns, render(messages), render(marked), prompt);
    ASSERT_EQ(spans.size(), turns.size()) << named.name;
    for (const auto& span : spans) EXPECT_TRUE(span.has_value()) << named.name;
    EXPECT_LT(turn_segments::samples_of(messages, turns).size(), 5u) << named.name;
  }
}

}  // namespace
}  // namespace heddle::data
