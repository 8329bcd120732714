#include "data/readers/jsonl_reader.h"

#include <cmath>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lzma.h>
#include <zlib.h>
#include <zstd.h>

#include "base/errors.h"
#include "base/files.h"
#include "data/json/json_text.h"
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

void write(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string gzip(const std::string& text) {
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  std::string out(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string xz(const std::string& text) {
  std::string packed(lzma_stream_buffer_bound(text.size()), '\0');
  std::size_t size = 0;
  EXPECT_EQ(lzma_easy_buffer_encode(
                6, LZMA_CHECK_CRC64, nullptr, reinterpret_cast<const std::uint8_t*>(text.data()),
                text.size(), reinterpret_cast<std::uint8_t*>(packed.data()), &size, packed.size()),
            LZMA_OK);
  packed.resize(size);
  return packed;
}

std::string zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

std::vector<std::string> lines_of(const std::filesystem::path& path) {
  LineReader reader(path);
  std::vector<std::string> lines;
  std::string line;
  while (reader.next(line)) lines.push_back(std::to_string(reader.line()) + ":" + line);
  return lines;
}

Row parse(const std::string& line, ReaderOptions options = {}) {
  return parse_line(line, {"data.jsonl", 12}, options);
}
std::string complaint(const std::string& line, ReaderOptions options = {}) {
  return message_of([&] { parse(line, options); });
}

TEST(LineReader, StripsMarksAndEndsAndCountsBlankLines) {
  const TemporaryDirectory folder;
  write(folder / "a", "\xef\xbb\xbf{\"a\": 1}\r\n\n  \t\r\n{\"b\": 2}\nlast");
  EXPECT_THAT(lines_of(folder / "a"), ElementsAre("1:{\"a\": 1}", "4:{\"b\": 2}", "5:last"));
  LineReader reader(folder / "a");
  std::string line;
  while (reader.next(line)) {
  }
  EXPECT_EQ(reader.blank_lines(), 2);
  EXPECT_EQ(reader.bytes_consumed(), std::filesystem::file_size(folder / "a"));
}

TEST(LineReader, ReadsCompressedFilesOfSeveralParts) {
  const TemporaryDirectory folder;
  std::string text, half;
  for (int i = 0; i < 70'000; ++i) {
    text += "line " + std::to_string(i * 7919) + "\n";
    if (i == 35'000) half = text;
  }
  write(folder / "plain", text);
  const auto expected = lines_of(folder / "plain");
  EXPECT_EQ(expected.size(), 70'000u);
  const std::string rest = text.substr(half.size());
  // The names say nothing about the content, on purpose.
  write(folder / "one", gzip(text));
  write(folder / "two", gzip(half) + gzip(rest) + std::string(512, '\0'));
  write(folder / "three", zstd(text));
  write(folder / "four", zstd(half) + zstd("") + zstd(rest));
  write(folder / "five", xz(half) + xz(rest));
  for (const char* name : {"one", "two", "three", "four", "five"}) {
    EXPECT_EQ(lines_of(folder / name), expected) << name;
  }
}

TEST(LineReader, SaysThatACompressedFileIsCutOrDamaged) {
  const TemporaryDirectory folder;
  std::string text;
  for (int i = 0; i < 5000; ++i) text += std::to_string(i * 104729) + "\n";
  for (auto* compress : {&gzip, &zstd, &xz}) {
    const std::string whole = compress(text);
    write(folder / "cut", whole.substr(0, whole.size() / 2));
    EXPECT_THAT(message_of([&] { lines_of(folder / "cut"); }), HasSubstr("it is cut"));
    std::string damaged = whole;
    for (std::size_t i = 20; i < damaged.size(); i += 7) damaged[i] ^= 0x55;
    write(folder / "damaged", damaged);
    EXPECT_THAT(message_of([&] { lines_of(folder / "damaged"); }),
                ::testing::AnyOf(HasSubstr("is damaged"), HasSubstr("it is cut")));
  }
}

TEST(LineReader, EndsAfterADamagedStream) {
  const TemporaryDirectory folder;
  std::string text;
  for (int i = 0; i < 20'000; ++i) text += "{\"text\": \"" + std::to_string(i * 104729) + "\"}\n";
  const std::string whole = gzip(text);
  write(folder / "cut", whole.substr(0, whole.size() / 2));
  JsonlReader reader(folder / "cut");
  int rows = 0, errors = 0;
  for (bool more = true; more && errors < 5;) {
    try {
      more = reader.next().has_value();
      rows += more;
    } catch (const DataError&) {
      ++errors;
    }
  }
  EXPECT_EQ(errors, 1);
  EXPECT_LT(rows, 20'000);
}

TEST(LineReader, GoesOnBehindALineThatIsTooLong) {
  const TemporaryDirectory folder;
  write(folder / "a",
        "short\n" + std::string(3'000'000, 'x') + "\nafter\n" + std::string(999, 'y'));
  LineReader reader(folder / "a", 100);
  std::string line;
  EXPECT_TRUE(reader.next(line));
  EXPECT_THAT(message_of([&] { reader.next(line); }), HasSubstr("a:2: line is longer than 100 B"));
  EXPECT_TRUE(reader.next(line));
  EXPECT_EQ(line, "after");
  EXPECT_THROW(reader.next(line), UnusableRow);
  EXPECT_FALSE(reader.next(line));
}

TEST(LineReader, NamesFilesThatItCannotRead) {
  const TemporaryDirectory folder;
  EXPECT_THAT(message_of([&] { LineReader reader(folder / "missing.jsonl"); }),
              HasSubstr("missing.jsonl: No such file"));
  EXPECT_THAT(message_of([&] { LineReader reader(folder.path()); }), HasSubstr("is a folder"));
  write(folder / "data.parquet", "PAR1\x15\x04");
  EXPECT_THAT(
      message_of([&] { LineReader reader(folder / "data.parquet"); }),
      ::testing::AllOf(HasSubstr("row 1"), HasSubstr("Parquet"), HasSubstr("neither packed")));
  write(folder / "data.arrow", "ARROW1");
  EXPECT_THAT(message_of([&] { LineReader reader(folder / "data.arrow"); }),
              HasSubstr("an Arrow file"));
  write(folder / "empty", "");
  EXPECT_THAT(lines_of(folder / "empty"), ElementsAre());
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
  write(folder / "a.jsonl", "{\"text\": \"x\"}\n\n{\"text\": }\n{\"text\": \"z\", \"id\": 9}\n");
  JsonlReader reader(folder / "a.jsonl");
  EXPECT_EQ(reader.next()->row.text, "x");
  EXPECT_THAT(message_of([&] { reader.next(); }), HasSubstr("a.jsonl:3: not valid JSON"));
  const auto last = reader.next();
  EXPECT_EQ(last->row.text, "z");
  EXPECT_EQ(last->value["id"], 9);
  EXPECT_EQ(last->line, 4);
  EXPECT_FALSE(reader.next());
}

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
