// Parquet and Arrow files, written by Arrow's own writers, give the rows that JSON Lines of the
// same data give.
#include <fstream>

#include <arrow/api.h>
#include <arrow/io/api.h>
#include <arrow/ipc/api.h>
#include <arrow/json/api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <parquet/arrow/writer.h>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "data/readers/data_files.h"
#include "data/readers/jsonl_reader.h"
#include "testing/message_of.h"
#include "testing/temporary_directory.h"

namespace heddle::data {
namespace {

using heddle::testing::message_of;
using heddle::testing::TemporaryDirectory;
using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;

namespace fs = std::filesystem;
using Table = std::shared_ptr<arrow::Table>;

template <class T>
T get(arrow::Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().ToString());
  return std::move(result).ValueUnsafe();
}

void check(const arrow::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

const std::vector<std::string> kRows = {
    R"({"id":1,"text":"plain","score":0.1,"good":true,"tags":["a","b"],"messages":[{"role":"user","content":"q","weight":null},{"role":"assistant","content":"a\n\"é中\u0001","weight":0.5}],"meta":{"of":{"deep":[[1,2],[]]}}})",
    R"({"id":-9007199254740993,"text":"","score":2.0,"good":false,"tags":[],"messages":[{"role":"user","content":null,"weight":null}],"meta":null})",
    R"({"id":null,"text":null,"score":1e300,"good":null,"tags":null,"messages":null,"meta":{"of":null}})",
    R"({"id":4,"text":"last \\ / \t","score":-0.0,"good":true,"tags":[null,"c"],"messages":[],"meta":{"of":{"deep":null}}})",
};

Table table_of(const std::vector<std::string>& rows) {
  std::string lines;
  for (const std::string& row : rows) lines += row + "\n";
  const auto reader = get(arrow::json::TableReader::Make(
      arrow::default_memory_pool(),
      std::make_shared<arrow::io::BufferReader>(arrow::Buffer::FromString(lines)),
      arrow::json::ReadOptions::Defaults(), arrow::json::ParseOptions::Defaults()));
  return get(reader->Read());
}

enum class Kind { kParquet, kFile, kStream };
constexpr Kind kKinds[] = {Kind::kParquet, Kind::kFile, Kind::kStream};

fs::path write(const TemporaryDirectory& folder, const Table& table, Kind kind,
               std::int64_t rows_at_once = 3, const std::string& name = "data") {
  const fs::path path = folder / (name + (kind == Kind::kParquet ? ".parquet" : ".arrow"));
  const auto file = get(arrow::io::FileOutputStream::Open(path.string()));
  if (kind == Kind::kParquet) {
    check(parquet::arrow::WriteTable(*table, arrow::default_memory_pool(), file, rows_at_once));
  } else {
    const auto writer =
        get(kind == Kind::kFile ? arrow::ipc::MakeFileWriter(file, table->schema())
                                : arrow::ipc::MakeStreamWriter(file, table->schema()));
    check(writer->WriteTable(*table, rows_at_once));
    check(writer->Close());
  }
  check(file->Close());
  return path;
}

std::vector<ordered_json> rows_of(const fs::path& path) {
  const auto reader = RecordReader::open(path);
  std::vector<ordered_json> rows;
  std::string json;
  while (reader->next(json)) {
    EXPECT_EQ(reader->line(), std::ssize(rows) + 1);
    rows.push_back(ordered_json::parse(json));
  }
  EXPECT_FALSE(reader->next(json));
  EXPECT_EQ(reader->bytes_consumed(), fs::file_size(path));
  return rows;
}

Table one_column(const std::shared_ptr<arrow::Array>& column) {
  return arrow::Table::Make(arrow::schema({arrow::field("x", column->type())}), {column});
}

template <class Builder, class... Values>
std::shared_ptr<arrow::Array> array_of(Builder builder, const Values&... values) {
  (check(builder.Append(values)), ...);
  check(builder.AppendNull());
  return get(builder.Finish());
}

TEST(ArrowFile, GivesTheRowsOfJsonLines) {
  const TemporaryDirectory folder;
  for (const Kind kind : kKinds) {
    const std::vector<ordered_json> rows = rows_of(write(folder, table_of(kRows), kind));
    ASSERT_EQ(rows.size(), kRows.size());
    for (std::size_t i = 0; i < rows.size(); ++i)
      EXPECT_EQ(rows[i].dump(), ordered_json::parse(kRows[i]).dump()) << static_cast<int>(kind);
  }
}

TEST(ArrowFile, WritesValuesOfEveryTypeAsPythonShowsThem) {
  const TemporaryDirectory folder;
  arrow::StringBuilder words;
  check(words.AppendValues({"no", "yes"}));
  const auto dictionary = get(arrow::DictionaryArray::FromArrays(
      array_of(arrow::Int8Builder(), 1, 0), get(words.Finish())));
  const auto list = [] {
    auto values = std::make_shared<arrow::Int32Builder>();
    arrow::LargeListBuilder builder(arrow::default_memory_pool(), values);
    check(builder.Append());
    check(values->AppendValues({5, 6}));
    check(builder.AppendNull());
    return get(builder.Finish());
  }();
  const auto map = [] {
    auto keys = std::make_shared<arrow::StringBuilder>();
    auto items = std::make_shared<arrow::Int64Builder>();
    arrow::MapBuilder builder(arrow::default_memory_pool(), keys, items);
    check(builder.Append());
    check(keys->Append("k"));
    check(items->Append(7));
    return get(builder.Finish());
  }();
  const std::vector<std::pair<std::shared_ptr<arrow::Array>, std::string>> cases = {
      {array_of(arrow::UInt64Builder(), 18446744073709551615u), "[18446744073709551615,null]"},
      {array_of(arrow::Int8Builder(), -128), "[-128,null]"},
      {array_of(arrow::FloatBuilder(), 0.1f, 3.0f), "[0.10000000149011612,3.0,null]"},
      {array_of(arrow::LargeStringBuilder(), "large"), R"(["large",null])"},
      {array_of(arrow::Date32Builder(), 0), R"(["1970-01-01",null])"},
      {dictionary, R"(["yes","no",null])"},
      {list, "[[5,6],null]"},
      {map, R"([{"k":7}])"},
  };
  for (const Kind kind : kKinds) {
    for (const auto& [column, expected] : cases) {
      ordered_json found = ordered_json::array();
      for (ordered_json& row : rows_of(write(folder, one_column(column), kind)))
        found.push_back(row["x"]);
      EXPECT_EQ(found.dump(), expected) << column->type()->ToString();
    }
  }
}

TEST(ArrowFile, IsReadByPieces) {
  const TemporaryDirectory folder;
  arrow::Int64Builder numbers;
  for (int i = 0; i < 5000; ++i) check(numbers.Append(i));
  const Table table = one_column(get(numbers.Finish()));
  for (const Kind kind : kKinds) {
    for (const std::int64_t at_once : {1, 700, 100000}) {
      const std::vector<ordered_json> rows = rows_of(write(folder, table, kind, at_once));
      ASSERT_EQ(rows.size(), 5000u);
      for (int i = 0; i < 5000; ++i) ASSERT_EQ(rows[static_cast<std::size_t>(i)]["x"], i);
    }
  }
}

TEST(ArrowFile, BecomesRowsWithPlacesInMessages) {
  const TemporaryDirectory folder;
  const fs::path good = write(folder, table_of({kRows[0]}), Kind::kParquet);
  ReaderOptions options;
  options.format = RowFormat::kMessages;
  JsonlReader reader(good, options);
  const auto item = reader.next();
  ASSERT_TRUE(item);
  EXPECT_EQ(item->row.messages.size(), 2u);
  EXPECT_EQ(item->row.message_weights[1], 0.5);
  EXPECT_FALSE(item->row.messages[0].contains("weight"));

  const fs::path bad =
      write(folder, table_of({R"({"text":"a"})", R"({"text":""})"}), Kind::kStream, 1, "bad");
  JsonlReader stopped(bad);
  EXPECT_TRUE(stopped.next());
  EXPECT_THAT(message_of([&] { stopped.next(); }),
              HasSubstr("bad.arrow:2: field 'text': is empty"));
}

TEST(ArrowFile, NamesRowAndColumnOfWhatJsonHasNot) {
  const TemporaryDirectory folder;
  const fs::path nan = write(
      folder, one_column(array_of(arrow::DoubleBuilder(), 1.0, std::nan(""), 3.0)), Kind::kParquet);
  const auto reader = RecordReader::open(nan);
  std::string json;
  EXPECT_TRUE(reader->next(json));
  EXPECT_THAT(message_of([&] { reader->next(json); }),
              HasSubstr("data.parquet:2: column 'x' is NaN, which JSON has not"));
  EXPECT_TRUE(reader->next(json));
  EXPECT_EQ(json, R"({"x":3.0})");
  const fs::path bytes =
      write(folder, one_column(array_of(arrow::BinaryBuilder(), "\xff")), Kind::kFile);
  EXPECT_THAT(message_of([&] { rows_of(bytes); }),
              HasSubstr("data.arrow:1: column 'x' is of type binary, which has no form in JSON"));
}

TEST(ArrowFile, BoundsARow) {
  const TemporaryDirectory folder;
  const std::string text(1000, 'x');
  const fs::path path =
      write(folder, table_of({R"({"text":"a"})", "{\"text\":\"" + text + "\"}"}), Kind::kFile);
  const auto reader = RecordReader::open(path, 100);
  std::string json;
  EXPECT_TRUE(reader->next(json));
  EXPECT_THAT(message_of([&] { reader->next(json); }),
              HasSubstr("data.arrow:2: row is longer than 100 B"));
  EXPECT_FALSE(reader->next(json));
}

/// Cut anywhere and with bytes changed a file gives rows or a DataError that names it.
TEST(ArrowFile, DamageIsAnError) {
  const TemporaryDirectory folder;
  for (const Kind kind : kKinds) {
    const fs::path path = write(folder, table_of(kRows), kind);
    std::ifstream file(path, std::ios::binary);
    const std::string whole{std::istreambuf_iterator<char>(file), {}};
    int refused = 0;
    for (std::size_t at = 8; at < whole.size(); at += 1 + whole.size() / 97) {
      for (const bool is_cut : {true, false}) {
        std::string bytes = is_cut ? whole.substr(0, at) : whole;
        if (!is_cut) bytes[at] = static_cast<char>(bytes[at] ^ 0x5a);
        const fs::path broken = folder / ("broken" + path.extension().string());
        std::ofstream(broken, std::ios::binary) << bytes;
        try {
          const auto reader = RecordReader::open(broken);
          std::string json;
          while (reader->next(json)) {
          }
        } catch (const DataError& error) {
          ++refused;
          EXPECT_THAT(error.what(), HasSubstr("broken."));
        }
      }
    }
    EXPECT_GT(refused, 50) << static_cast<int>(kind);
  }
}

TEST(ArrowFile, IsFoundInFolders) {
  const TemporaryDirectory folder;
  const fs::path path = write(folder, table_of(kRows), Kind::kParquet);
  EXPECT_THAT(expand_files(folder.path().string()), ::testing::ElementsAre(path.string()));
}

}  // namespace
}  // namespace heddle::data
