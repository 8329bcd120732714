#include "data/readers/line_reader.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lzma.h>
#include <zstd.h>

#include "base/errors.h"
#include "base/files.h"
#include "data/readers/jsonl_reader.h"
#include "testing/gzip.h"
#include "testing/message_of.h"
#include "testing/temporary_directory.h"

namespace heddle::data {
namespace {

using heddle::testing::gzip_of;
using heddle::testing::message_of;
using heddle::testing::TemporaryDirectory;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

void write(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
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
  write(folder / "one", gzip_of(text));
  write(folder / "two", gzip_of(half) + gzip_of(rest) + std::string(512, '\0'));
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
  for (auto* compress : {&gzip_of, &zstd, &xz}) {
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
  const std::string whole = gzip_of(text);
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

}  // namespace
}  // namespace heddle::data
