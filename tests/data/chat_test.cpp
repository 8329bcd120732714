// Input of a template, and the text that is the assistant's, for the forms of data sets and the
// habits of templates.
#include "data/rendering/chat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/files.h"
#include "data/json/json_text.h"
#include "data/readers/jsonl_reader.h"
#include "data/rendering/renderer.h"
#include "loader_fixture.h"
#include "testing/message_of.h"
#include "testing/paths.h"
#include "testing/temporary_directory.h"

namespace heddle::data {
namespace {

using heddle::testing::message_of;
using testing::chatml_template;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::make_tokenizer;
using testing::thinking_template;

Row parse(const std::string& line) { return parse_line(line, {"data.jsonl", 1}, {}); }

RenderOptions with_template(const std::string& source, LossOn loss_on = LossOn::kAll) {
  RenderOptions options;
  options.chat_template = source;
  options.loss_on = loss_on;
  return options;
}

/// The rendering of a row of messages under a template.
std::string render(const std::string& source, const std::string& messages) {
  const auto tokenizer = make_tokenizer();
  return Renderer(*tokenizer, with_template(source))
      .render(parse("{\"messages\": " + messages + "}"))
      .text;
}

std::vector<std::string> loss_texts(const std::string& source, const std::string& messages) {
  const auto tokenizer = make_tokenizer();
  const RenderedText rendered = Renderer(*tokenizer, with_template(source, LossOn::kAssistant))
                                    .render(parse("{\"messages\": " + messages + "}"));
  std::vector<std::string> texts;
  for (const LossSpan& span : rendered.spans)
    texts.push_back(rendered.text.substr(span.begin, span.end - span.begin));
  return texts;
}

const std::string kParts =
    R"([{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "three"}]}])";
const std::string kTexts =
    R"([{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}])";

TEST(Chat, PartsGoToTemplatesThatReadThem) {
  const std::string loop =
      "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p.type == 'text' %}<{{ "
      "p.text }}>{% endif %}{% endfor %};{% endfor %}";
  EXPECT_EQ(render(loop, kParts), "user:<one ><two>;assistant:<three>;");
  const std::string filter =
      "{% for m in messages %}{{ m.content | selectattr('type', 'equalto', 'text') | "
      "map(attribute='text') | join('+') }};{% endfor %}";
  EXPECT_EQ(render(filter, kParts), "one +two;three;");
  const std::string either =
      "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in "
      "m.content %}[{{ p.text }}]{% endfor %}{% endif %};{% endfor %}";
  EXPECT_EQ(render(either, kParts), "[one ][two];[three];");
  EXPECT_EQ(render(either, kTexts), "one two;three;");
  // A template that reads texts only would show Python's form of the list, or raise.
  EXPECT_EQ(render("{% for m in messages %}{{ m.content }};{% endfor %}", kParts),
            "one two;three;");
  EXPECT_EQ(render("{% for m in messages %}{{ m.content + ';' }}{% endfor %}", kParts),
            "one two;three;");
  // One that reads parts only would lose texts.
  EXPECT_EQ(render(loop, kTexts), "user:<one two>;assistant:<three>;");
  EXPECT_EQ(render("{% for m in messages %}{{ m.content[0].text + ';' }}{% endfor %}", kTexts),
            "one two;three;");
  // Each role by itself.
  EXPECT_EQ(
      render("{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}<{{ p.text "
             "}}>{% endfor %}{% else %}{{ m.content | trim }}{% endif %};{% endfor %}",
             kParts),
      "<one ><two>;three;");
}

TEST(Chat, ArgumentsComeAsTheTemplateReadsThem) {
  const auto row = [](const char* arguments) {
    return std::string(R"([{"role": "user", "content": "w"}, {"role": "assistant", "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": )") +
           arguments + "}}]}]";
  };
  const char* text = R"("{\"city\":  \"A\", \"n\": 1000000000000000000000}")";
  const char* object = R"({"city": "A", "n": 1000000000000000000000})";
  const std::string pairs =
      "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in "
      "c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}";
  const std::string dumps =
      "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson "
      "}}{% endfor %}{% endfor %}";
  const std::string either =
      "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.function.arguments is "
      "string "
      "%}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% "
      "endfor "
      "%}{% endfor %}";
  const std::string texts =
      "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '<' + c.function.arguments + '>' "
      "}}{% endfor %}{% endfor %}";
  for (const char* arguments : {text, object}) {
    EXPECT_EQ(render(pairs, row(arguments)), "city=A;n=1000000000000000000000;") << arguments;
    EXPECT_EQ(render(dumps, row(arguments)), R"({"city": "A", "n": 1000000000000000000000})");
  }
  EXPECT_EQ(render(either, row(text)), R"({"city":  "A", "n": 1000000000000000000000})");
  EXPECT_EQ(render(texts, row(object)), R"(<{"city": "A", "n": 1000000000000000000000}>)");
  EXPECT_EQ(render(pairs, row("\"\"")), "");
}

TEST(Chat, AbsentContentsAreEmptyWhereATemplateNeedsThem) {
  const std::string turns =
      R"([{"role": "user", "content": "go"}, {"role": "assistant", "content": null, "tool_calls": [{"name": "f"}]},
          {"role": "tool", "content": null}, {"role": "tool"}, {"role": "assistant", "content": "done"}])";
  EXPECT_EQ(
      render("{% for m in messages %}{{ m.content if m.content is defined else '-' }};{% endfor %}",
             turns),
      "go;-;-;-;done;");
  EXPECT_EQ(render("{% for m in messages %}{{ m.content + ';' }}{% endfor %}", turns),
            "go;;;;done;");
  EXPECT_EQ(render("{% for m in messages %}{{ m.content }};{% endfor %}", turns), "go;;;;done;");
}

TEST(Renderer, TakesTheTemplateForTools) {
  const heddle::testing::TemporaryDirectory folder;
  const std::filesystem::path example = heddle::testing::source_path("examples/tokenizer-4k");
  std::filesystem::copy(example / "tokenizer.json", folder / "tokenizer.json");
  const auto text_of = [&](const std::string& tools) {
    const auto tokenizer = Tokenizer::load(folder.path());
    return Renderer(*tokenizer, {})
        .render(
            parse(R"({"messages": [{"role": "user", "content": "hi"}], "tools": )" + tools + "}"))
        .text;
  };
  const auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories((folder / name).parent_path());
    files::write_atomically(folder / name, text);
  };
  const std::string tools = R"([{"name": "f"}])";
  for (const char* named :
       {R"([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])",
        R"({"default": "plain", "tool_use": "tools", "rag": "rag"})"}) {
    write("tokenizer_config.json", "{\"chat_template\": " + std::string(named) + "}");
    EXPECT_EQ(text_of(tools), "tools");
    EXPECT_EQ(text_of("[]"), "plain");
    EXPECT_EQ(text_of("null"), "plain");
  }
  write("chat_template.jinja", "file");
  EXPECT_EQ(text_of(tools), "file");
  write("additional_chat_templates/tool_use.jinja", "file with tools");
  EXPECT_EQ(text_of(tools), "file with tools");
  EXPECT_EQ(text_of("null"), "file");
  std::filesystem::remove(folder / "chat_template.jinja");
  write("tokenizer_config.json", R"({"chat_template": [{"name": "rag", "template": "x"}]})");
  EXPECT_EQ(text_of(tools), "file with tools");
  EXPECT_THAT(message_of([&] { text_of("null"); }),
              HasSubstr("no chat template of the name 'default', only 'rag, tool_use'"));
}

TEST(Renderer, GivesARowsOwnVariablesToTheTemplate) {
  const auto tokenizer = make_tokenizer();
  RenderOptions options = with_template("{{ a }},{{ b }},{{ c is none }}");
  options.template_variables = {{"a", 1}, {"b", 2}};
  const Renderer renderer(*tokenizer, options);
  const auto text_of = [&](const std::string& given) {
    return renderer
        .render(
            parse(R"({"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": )" +
                  given + "}"))
        .text;
  };
  EXPECT_EQ(text_of("null"), "1,2,False");
  EXPECT_EQ(text_of(R"({"b": "x"})"), "1,x,False");
  EXPECT_EQ(text_of(R"({"a": false, "b": [3], "c": null})"), "False,[3],True");
}

TEST(AssistantSpans, OfAnAssistantWhoSpeaksFirst) {
  const std::string needs_user =
      "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}{{ "
      "raise_exception('No user query.') }}{% endif %}";
  const std::string greeting =
      R"([{"role": "assistant", "content": "Welcome!"}, {"role": "user", "content": "Where?"},
          {"role": "assistant", "content": "Here."}])";
  const std::string system = R"([{"role": "system", "content": "Be."}, )" + greeting.substr(1);
  const std::string twice = R"([{"role": "assistant", "content": "Hm."}, )" + greeting.substr(1);
  for (const std::string& source :
       {needs_user + chatml_template(), needs_user + thinking_template()}) {
    for (const std::string& messages : {greeting, system}) {
      EXPECT_THAT(loss_texts(source, messages),
                  ElementsAre("Welcome!<|im_end|>", ::testing::EndsWith("Here.<|im_end|>")));
    }
  }
  EXPECT_THAT(loss_texts(needs_user + chatml_template(), twice),
              ElementsAre("Hm.<|im_end|>", "Welcome!<|im_end|>", "Here.<|im_end|>"));
}

TEST(AssistantSpans, WithATokenAtTheEndOfConversations) {
  const std::string turns =
      R"([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
          {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}])";
  const std::string phi =
      "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>\n{% endfor %}{% if "
      "add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}";
  EXPECT_THAT(loss_texts(phi, turns), ElementsAre("b<|im_end|>", "d<|im_end|>\n<|endoftext|>"));
  const std::string open =
      "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.last %}\n{% elif not "
      "add_generation_prompt %}<|endoftext|>{% endif %}{% endfor %}{% if add_generation_prompt "
      "%}\nassistant: {% endif %}";
  EXPECT_THAT(loss_texts(open, turns), ElementsAre("b", "d<|endoftext|>"));
  const std::string plain =
      "{% for m in messages %}{{ m.role }} said {{ m.content }} #end\n{% endfor %}{% if "
      "add_generation_prompt %}assistant said {% else %}<|endoftext|>\n{% endif %}";
  EXPECT_THAT(loss_texts(plain, turns), ElementsAre("b #end", "d #end\n<|endoftext|>"));
  // Earlier turns that end with another token than the last: which one was written is not told.
  const std::string other =
      "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<|im_end|>' if not loop.last else "
      "'<|endoftext|>' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";
  EXPECT_THAT(message_of([&] { loss_texts(other, turns); }), HasSubstr("cannot tell which text"));
}

TEST(AssistantSpans, OfTurnsInParts) {
  const std::string parts =
      R"([{"role": "user", "content": "q"}, {"role": "assistant", "content": [{"type": "text", "text": "b "},
          {"type": "text", "text": "c"}]}, {"role": "user", "content": "r"},
          {"role": "assistant", "content": "d"}])";
  const std::string loop =
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last "
      "%}<think>\n</think>\n{% endif %}{% for p in m.content %}{{ p.text | trim }} {% endfor "
      "%}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% "
      "endif %}";
  EXPECT_THAT(loss_texts(loop, parts), ElementsAre("b c <|im_end|>", "</think>\nd <|im_end|>"));
  EXPECT_THAT(loss_texts(chatml_template(), parts), ElementsAre("b c<|im_end|>", "d<|im_end|>"));
}

TEST(Renderer, ContinuesTheFinalMessage) {
  const auto tokenizer = make_tokenizer(chatml_template());
  const auto open = [&](const std::string& source, const std::string& content) {
    const Renderer renderer(*tokenizer, with_template(source));
    return tokenizer->decode(renderer.tokenize_prompt(
        parse(
            R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": )" +
            content + "}]}"),
        /*continue_final_message=*/true));
  };
  EXPECT_THAT(open(chatml_template(), R"("The answer ")"),
              ::testing::EndsWith("assistant\nThe answer "));
  EXPECT_EQ(open("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", R"("The answer ")"),
            "[q][The answer");
  EXPECT_EQ(
      open("{% for m in messages %}[{% for p in m.content %}{{ p.text }}{% endfor %}]{% endfor %}",
           R"([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])"),
      "[q][ab");
  const Renderer renderer(*tokenizer, with_template(chatml_template()));
  EXPECT_THAT(message_of([&] {
                renderer.tokenize_prompt(
                    parse(R"({"messages": [{"role": "user", "content": "q"}]})"), true);
              }),
              HasSubstr("field 'messages[0]': is no turn of the assistant"));
}

TEST(Renderer, PutsLossWhereMasksOfTokensSay) {
  const auto tokenizer = make_tokenizer();
  const Row row =
      parse(R"({"input_ids": [0, 97, 98, 99, 100, 0], "attention_mask": [0, 1, 1, 1, 1, 0],
      "completion_mask": [0, 0, 0, 1, 1, 0]})");
  EXPECT_THAT(Renderer(*tokenizer, {}).tokenize(row).labels, ElementsAre(-100, 99, 100, -100));
  RenderOptions all;
  all.loss_on = LossOn::kAll;
  EXPECT_THAT(Renderer(*tokenizer, all).tokenize(row).labels, ElementsAre(98, 99, 100, -100));
}

}  // namespace
}  // namespace heddle::data
