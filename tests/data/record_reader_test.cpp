#include <cctype>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zstd.h>

#include "base/errors.h"
#include "data/readers/data_files.h"
#include "data/readers/jsonl_reader.h"
#include "testing/gzip.h"
#include "testing/message_of.h"
#include "testing/temporary_directory.h"

namespace heddle::data {
namespace {

using heddle::testing::gzip_of;
using heddle::testing::message_of;
using heddle::testing::TemporaryDirectory;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

using namespace std::string_literals;

void write(const std::filesystem::path& path, const std::string& bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}

std::vector<std::string> records_of(const std::filesystem::path& path) {
  const auto reader = RecordReader::open(path);
  std::vector<std::string> records;
  std::string json;
  while (reader->next(json)) records.push_back(std::to_string(reader->line()) + ":" + json);
  return records;
}

std::string complaint(const std::filesystem::path& path) {
  return message_of([&] {
    JsonlReader reader(path);
    while (reader.next()) {
    }
  });
}

TEST(RecordReader, TakesAListApart) {
  const TemporaryDirectory folder;
  const std::string list =
      "\xef\xbb\xbf [{\"a\": \"],[\\\"\"},\n {\"b\": [1, {\"c\": 2}]} ,{}\n]\n";
  write(folder / "a.json", list);
  EXPECT_THAT(records_of(folder / "a.json"),
              ElementsAre("1:{\"a\": \"],[\\\"\"}", "2:{\"b\": [1, {\"c\": 2}]} ", "2:{}\n"));
  write(folder / "empty.jsonl", "[ \n]");
  EXPECT_THAT(records_of(folder / "empty.jsonl"), ElementsAre());
  write(folder / "cut", "[{\"text\": \"x\"},{\"te");
  EXPECT_THAT(complaint(folder / "cut"), HasSubstr("cut:1: the file ends inside its JSON list"));
  write(folder / "more", "[{\"text\": \"x\"}]\n{}");
  EXPECT_THAT(complaint(folder / "more"), HasSubstr("more:2: text follows the JSON list"));
  write(folder / "comma", "[{\"text\": \"x\"},\n]");
  EXPECT_THAT(complaint(folder / "comma"), HasSubstr("comma and no row after it"));
}

TEST(RecordReader, ReadsTables) {
  const TemporaryDirectory folder;
  write(folder / "a.csv", "prompt,completion\r\n\r\na,\"b, \"\"c\"\"\nd\"\r\n\"\",caf\xc3\xa9\\\n");
  EXPECT_THAT(records_of(folder / "a.csv"),
              ElementsAre("3:{\"prompt\":\"a\",\"completion\":\"b, \\\"c\\\"\\u000ad\"}",
                          "5:{\"prompt\":\"\",\"completion\":\"caf\xc3\xa9\\\\\"}"));
  write(folder / "a.TSV", "text\tlabel\nx, y\t1\n");
  EXPECT_THAT(records_of(folder / "a.TSV"), ElementsAre("2:{\"text\":\"x, y\",\"label\":\"1\"}"));
  write(folder / "short.csv", "a,b\n1,2\n3\n");
  EXPECT_THAT(complaint(folder / "short.csv"), HasSubstr("no field tells"));
  write(folder / "fields.csv", "text,b\nx,2\n3\n");
  EXPECT_THAT(complaint(folder / "fields.csv"),
              HasSubstr("fields.csv:3: the row has 1 fields, the first line names 2"));
  write(folder / "open.csv", "text\n\"x\n");
  EXPECT_THAT(complaint(folder / "open.csv"), HasSubstr("opens with '\"' and does not close"));
  write(folder / "twice.csv", "text,text\nx,y\n");
  EXPECT_THAT(complaint(folder / "twice.csv"), HasSubstr("names column 'text' twice"));
  write(folder / "semicolon.csv", "text;label\nx;1\n");
  EXPECT_THAT(complaint(folder / "semicolon.csv"), HasSubstr("separated by ';'"));
}

TEST(RecordReader, TakesATextAsOneRow) {
  const TemporaryDirectory folder;
  write(folder / "a.txt", "one\n\"two\"\n\n{three}\n");
  EXPECT_EQ(JsonlReader(folder / "a.txt").next()->row.text, "one\n\"two\"\n\n{three}\n");
  write(folder / "empty.txt", "");
  EXPECT_THAT(records_of(folder / "empty.txt"), ElementsAre());
}

TEST(RecordReader, NamesOtherKindsOfFilesAndTheRemedy) {
  const TemporaryDirectory folder;
  const std::string tar = "d.jsonl" + std::string(250, '\0') + "ustar" + std::string(200, '\0');
  const std::string packed = gzip_of(tar);
  const struct {
    const char* name;
    std::string bytes;
    const char* kind;
    const char* remedy;
  } files[] = {
      {"bz2", "BZh91AY&SYxx", "a bzip2 file", "bzip2 -dc"},
      {"zip", "PK\x03\x04\x14\0"s, "a zip archive", "unzip"},
      {"tar", tar, "a tar archive", "tar xf"},
      {"tar.gz", packed, "a tar archive", "tar xf"},
      {"7z", "7z\xbc\xaf\x27\x1c"s, "a 7-Zip archive", "7z x"},
      {"lz4", "\x04\x22\x4d\x18xx", "an lz4 file", "lz4 -dc"},
      {"stream", "\xff\xff\xff\xff\x10\0"s, "an Arrow stream", "ends in .arrow"},
      {"utf16", "\xff\xfe{\0\"\0"s, "a text in UTF-16", "iconv -f UTF-16 "},
      {"utf16be", "\0{\0\""s, "a text in UTF-16", "iconv -f UTF-16BE"},
      {"utf32", "\xff\xfe\0\0{\0\0\0"s, "a text in UTF-32", "iconv -f UTF-32"},
      {"lfs", "version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS", "git lfs"},
      {"pretty", "{\n  \"messages\": []\n}\n", "an object over several lines", "jq -c . "},
      {"html", "<!DOCTYPE html>\n", "a web page", "fetch it again"},
      {"table", "prompt,completion\na,b\n", "table", ".csv"},
      {"latin1", "{\"text\": \"caf\xe9\"}\n", "0xE9", "iconv -f LATIN1"},
  };
  for (const auto& file : files) {
    write(folder / file.name, file.bytes);
    const std::string message = complaint(folder / file.name);
    EXPECT_THAT(message, AllOf(HasSubstr(file.kind), HasSubstr(file.remedy), HasSubstr(file.name)));
    for (const char c : message) EXPECT_TRUE(c >= ' ' && c < '\x7f') << message;
  }
}

TEST(RecordReader, ReadsZstdOfEveryWindowAndLength) {
  const TemporaryDirectory folder;
  // Whole buffers of the reader, and less and more by one.
  for (const std::size_t bytes : {262'143, 262'144, 262'145, 524'288}) {
    std::string text = "{\"text\": \"" + std::string(bytes - 13, 'x') + "\"}\n";
    std::string packed(ZSTD_compressBound(text.size()), '\0');
    packed.resize(ZSTD_compress(packed.data(), packed.size(), text.data(), text.size(), 3));
    write(folder / "a.zst", packed);
    EXPECT_EQ(JsonlReader(folder / "a.zst").next()->row.text.size(), bytes - 13) << bytes;
  }
  for (const int window : {28, 29, 30}) {
    ZSTD_CCtx* context = ZSTD_createCCtx();
    ZSTD_CCtx_setParameter(context, ZSTD_c_windowLog, window);
    ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, 0);
    std::string text = "{\"text\": \"x\"}\n", packed(4096, '\0');
    ZSTD_inBuffer in{text.data(), text.size(), 0};
    ZSTD_outBuffer out{packed.data(), packed.size(), 0};
    // Two calls: the size is not known when the frame begins, so its window is the one asked for.
    ZSTD_compressStream2(context, &out, &in, ZSTD_e_flush);
    ZSTD_compressStream2(context, &out, &in, ZSTD_e_end);
    ZSTD_freeCCtx(context);
    write(folder / "long.zst", packed.substr(0, out.pos));
    EXPECT_EQ(JsonlReader(folder / "long.zst").next()->row.text, "x") << window;
  }
  // A frame that readers skip stands before the data in files of pzstd.
  std::string text = "{\"text\": \"y\"}\n", packed(4096, '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), text.data(), text.size(), 3));
  write(folder / "skip.zst", "\x50\x2a\x4d\x18\x04\0\0\0abcd"s + packed);
  EXPECT_EQ(JsonlReader(folder / "skip.zst").next()->row.text, "y");
}

TEST(DataFiles, ComeFromFoldersAndPatterns) {
  const TemporaryDirectory folder;
  for (const char* name : {"b.jsonl", "a.csv.gz", "deep/er/c.txt", "README.md", ".hidden.jsonl"})
    write(folder / name, "");
  const std::string root = folder.path().string();
  EXPECT_THAT(expand_files(root),
              ElementsAre(root + "/a.csv.gz", root + "/b.jsonl", root + "/deep/er/c.txt"));
  EXPECT_THAT(expand_files(root + "/*.jsonl"), ElementsAre(root + "/b.jsonl"));
  EXPECT_THAT(expand_files(root + "/**/?.txt"), ElementsAre(root + "/deep/er/c.txt"));
  EXPECT_THAT(expand_files(root + "/d*/*/*"), ElementsAre(root + "/deep/er/c.txt"));
  EXPECT_THAT(expand_files(root + "/missing.jsonl"), ElementsAre(root + "/missing.jsonl"));
  EXPECT_THAT(expand_files("-"), ElementsAre("-"));
  EXPECT_THAT(message_of([&] { expand_files(root + "/*.json"); }), HasSubstr("no file matches"));
  std::filesystem::create_directory(folder / "none");
  EXPECT_THAT(message_of([&] { expand_files(root + "/none"); }), HasSubstr("without data files"));
}

}  // namespace
}  // namespace heddle::data
