#include "data/loader/loader.h"

#include <algorithm>
#include <fstream>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/files.h"
#include "loader_fixture.h"
#include "testing/message_of.h"
#include "testing/paths.h"
#include "testing/temporary_directory.h"

namespace heddle::data {
namespace {

using heddle::testing::message_of;
using heddle::testing::TemporaryDirectory;
using ::testing::HasSubstr;
using testing::make_tokenizer;
using testing::numbered_rows;
using testing::to_list;
using testing::write_lines;

class DatasetTest : public ::testing::Test {
 protected:
  DatasetOptions options(const std::vector<std::string>& lines) {
    DatasetOptions options;
    options.files = {{write_lines(folder_ / "data.jsonl", lines).string(), 1}};
    options.cache_directory = (folder_ / "cache").string();
    return options;
  }
  TemporaryDirectory folder_;
  std::shared_ptr<const Tokenizer> tokenizer_ = make_tokenizer();
};

TEST_F(DatasetTest, HoldsOutAShareOfTheRowsByTheirText) {
  const std::vector<std::string> once = numbered_rows(4000, 29, 4);
  std::vector<std::string> lines = once;
  lines.insert(lines.end(), once.begin(), once.begin() + 500);  // some rows come twice
  DatasetOptions rest = options(lines), held_out = rest;
  rest.held_out = held_out.held_out = 0.1;
  held_out.takes_held_out = true;
  const auto train = Dataset::open(rest, *tokenizer_), eval = Dataset::open(held_out, *tokenizer_);
  EXPECT_EQ(train->rows() + eval->rows(), 4500);
  EXPECT_NEAR(static_cast<double>(eval->rows()), 450, 80);
  EXPECT_NE(train->key(), eval->key());
  std::set<std::string> trained;
  for (std::int64_t row = 0; row < train->rows(); ++row)
    trained.insert(lines[static_cast<std::size_t>(train->place(row).line - 1)]);
  for (std::int64_t row = 0; row < eval->rows(); ++row)
    EXPECT_FALSE(trained.contains(lines[static_cast<std::size_t>(eval->place(row).line - 1)]));
}

TEST_F(DatasetTest, IsTheSameFromTheCacheFromMemoryAndWithAnyThreads) {
  DatasetOptions one = options(numbered_rows(5000, 29, 4));
  one.threads = 1;
  const auto first = Dataset::open(one, *tokenizer_);
  EXPECT_FALSE(first->files()[0].from_cache);
  bool was_called = false;
  const auto second =
      Dataset::open(one, *tokenizer_, [&](const TokenizeProgress&) { was_called = true; });
  EXPECT_TRUE(second->files()[0].from_cache);
  EXPECT_FALSE(was_called);
  DatasetOptions memory = one;
  memory.cache_directory = "";
  memory.threads = 3;
  double fraction = 0;
  std::int64_t calls = 0;
  const auto third = Dataset::open(memory, *tokenizer_, [&](const TokenizeProgress& progress) {
    EXPECT_GE(progress.fraction, fraction);
    fraction = progress.fraction;
    ++calls;
  });
  EXPECT_EQ(fraction, 1);
  EXPECT_GE(calls, 3);
  for (const auto& other : {second, third}) {
    EXPECT_EQ(other->key(), first->key());
    EXPECT_EQ(other->report().to_json(), first->report().to_json());
    ASSERT_EQ(other->rows(), first->rows());
    for (std::int64_t row = 0; row < first->rows(); ++row) {
      const SequenceView a = first->row(row), b = other->row(row);
      ASSERT_TRUE(std::ranges::equal(a.tokens, b.tokens));
      ASSERT_TRUE(std::ranges::equal(a.labels, b.labels));
      ASSERT_TRUE(std::ranges::equal(a.weights, b.weights));
      ASSERT_EQ(first->loss_weight(row), other->loss_weight(row));
    }
  }
}

TEST_F(DatasetTest, SplitsLongRowsIntoSeveral) {
  DatasetOptions base =
      options({R"({"input_ids": [1, 2, 3]})", R"({"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]})",
               R"({"input_ids": [4, 5]})"});
  base.rendering.max_length = 4;
  base.rendering.truncation = Truncation::kSplit;
  const auto data = Dataset::open(base, *tokenizer_);
  EXPECT_THAT(data->lengths(), ::testing::ElementsAre(3, 4, 4, 2, 2));
  EXPECT_THAT(data->row(2).labels, ::testing::ElementsAre(6, 7, 8, 9));
  for (const std::int64_t row : {1, 2, 3}) EXPECT_EQ(data->place(row).line, 2);
  EXPECT_EQ(data->report().lines, 3);
  EXPECT_EQ(data->report().split, 1);
  EXPECT_EQ(data->report().loss_tokens, 2 + 9 + 1);
  EXPECT_THAT(data->report().summary(), HasSubstr("5 rows"));
  EXPECT_THAT(data->report().summary(), HasSubstr("1 split into several"));
}

TEST_F(DatasetTest, MakesAnotherCacheWhenAnythingChanges) {
  DatasetOptions base = options(numbered_rows(50, 29, 4));
  const std::string key = Dataset::open(base, *tokenizer_)->key();
  DatasetOptions longer = base;
  longer.rendering.max_length = 10;
  longer.rendering.truncation = Truncation::kKeepStart;
  EXPECT_NE(Dataset::open(longer, *tokenizer_)->key(), key);
  DatasetOptions renamed = base;
  renamed.reader.fields.text = "content";
  EXPECT_NE(Dataset::open(renamed, *tokenizer_)->key(), key);
  std::ofstream(folder_ / "data.jsonl", std::ios::app) << "{\"input_ids\": [1, 2]}\n";
  const auto appended = Dataset::open(base, *tokenizer_);
  EXPECT_NE(appended->key(), key);
  EXPECT_EQ(appended->rows(), 51);
}

// The ending of the name decides how the same bytes are read.
TEST_F(DatasetTest, AFileThatIsReadOtherwiseHasAnotherPlaceInTheCache) {
  DatasetOptions lines = options({R"({"text": "ab, cd"})", R"({"text": "ef"})"});
  EXPECT_EQ(Dataset::open(lines, *tokenizer_)->rows(), 2);
  DatasetOptions text = lines;
  text.files = {{(folder_ / "data.txt").string(), 1}};
  std::filesystem::copy_file(folder_ / "data.jsonl", folder_ / "data.txt");
  for (int i = 0; i < 2; ++i) {
    const auto whole = Dataset::open(text, *tokenizer_);
    EXPECT_EQ(whole->rows(), 1);
    EXPECT_EQ(whole->files()[0].from_cache, i > 0);
    const auto rows = Dataset::open(lines, *tokenizer_);
    EXPECT_EQ(rows->rows(), 2);
    EXPECT_TRUE(rows->files()[0].from_cache);
  }
}

TEST_F(DatasetTest, TokenisesAgainWhenTheCacheIsDamaged) {
  const DatasetOptions base = options(numbered_rows(50, 29, 4));
  Dataset::open(base, *tokenizer_);
  std::filesystem::path cache;
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "cache")) {
    if (entry.path().extension() == ".tokens") cache = entry.path();
  }
  const auto size = std::filesystem::file_size(cache);
  for (const std::uintmax_t cut : {std::uintmax_t{0}, std::uintmax_t{70}, size / 2, size - 1}) {
    std::filesystem::resize_file(cache, cut);
    const auto again = Dataset::open(base, *tokenizer_);
    EXPECT_FALSE(again->files()[0].from_cache);
    EXPECT_EQ(again->rows(), 50);
  }
  const std::string whole = files::read(cache);
  for (const std::size_t place : {std::size_t{0}, std::size_t{9}, std::size_t{40}, whole.size() / 4,
                                  whole.size() / 2, whole.size() - 20, whole.size() - 1}) {
    std::string flipped = whole;
    flipped[place] ^= 4;
    files::write_atomically(cache, flipped);
    EXPECT_FALSE(Dataset::open(base, *tokenizer_)->files()[0].from_cache) << place;
    EXPECT_TRUE(Dataset::open(base, *tokenizer_)->files()[0].from_cache);
  }
  // Files of an interrupted run are never taken for a cache.
  std::filesystem::remove(cache);
  std::ofstream(cache.string() + ".tmp") << "half";
  EXPECT_EQ(Dataset::open(base, *tokenizer_)->rows(), 50);
  EXPECT_TRUE(Dataset::open(base, *tokenizer_)->files()[0].from_cache);
}

TEST_F(DatasetTest, NamesTheFirstBadLineOrSkipsAndCounts) {
  std::vector<std::string> lines = numbered_rows(3000, 29, 4);
  lines[2500] = "{\"input_ids\": []}";
  lines[1234] = "{broken";
  lines[7] = "";
  DatasetOptions strict = options(lines);
  EXPECT_THAT(message_of([&] { Dataset::open(strict, *tokenizer_); }),
              HasSubstr("data.jsonl:1235: not valid JSON"));
  DatasetOptions lenient = strict;
  lenient.bad_rows = BadRowPolicy::kSkip;
  const auto data = Dataset::open(lenient, *tokenizer_);
  EXPECT_EQ(data->report().bad_rows, 2);
  EXPECT_EQ(data->report().blank_lines, 1);
  EXPECT_EQ(data->report().lines, 2999);
  EXPECT_EQ(data->rows(), 2997);
  EXPECT_THAT(data->report().bad_examples,
              ::testing::ElementsAre(HasSubstr(":1235:"), HasSubstr(":2501:")));
  EXPECT_THAT(data->report().summary(), HasSubstr("2 bad rows skipped"));
  EXPECT_EQ(data->place(1233).line, 1236);
  lenient.reader.max_line_bytes = 40;
  EXPECT_GT(Dataset::open(lenient, *tokenizer_)->report().bad_rows, 100);
}

TEST_F(DatasetTest, AHugeFileOfNoRowsIsNamedBeforeItIsHashed) {
  // To hash a terabyte takes minutes, in which the suite would be ended.
  for (const auto& [name, begin] :
       {std::pair{"zeros.jsonl", ""}, std::pair{"begun.jsonl", R"({"text": ")"},
        std::pair{"list.json", "["}, std::pair{"zeros.csv", ""}, std::pair{"zeros.txt", ""},
        std::pair{"blank.jsonl", "\n\n\n"}}) {
    files::write_atomically(folder_ / name, begin);
    std::filesystem::resize_file(folder_ / name, std::uintmax_t{1} << 40);
    DatasetOptions dataset = options({});
    dataset.files = {{(folder_ / name).string(), 1}};
    EXPECT_THAT(message_of([&] { Dataset::open(dataset, *tokenizer_); }), HasSubstr(name));
  }
}

TEST_F(DatasetTest, ADataSetWithoutLossTokensIsAnError) {
  EXPECT_THAT(message_of([&] {
                Dataset::open(options({R"({"input_ids": [1, 2], "labels": [1, -100]})"}),
                              *tokenizer_);
              }),
              HasSubstr("no token of the data set carries loss"));
  EXPECT_THAT(message_of([&] { Dataset::open(options({}), *tokenizer_); }),
              HasSubstr("data set is empty"));
  DatasetOptions strict = options({R"({"input_ids": [1, 2, 3]})"});
  strict.rendering.max_length = 2;
  EXPECT_THAT(message_of([&] { Dataset::open(strict, *tokenizer_); }),
              HasSubstr("1 dropped as too long"));
  strict.files[0].weight = -1;
  EXPECT_THAT(message_of([&] { Dataset::open(strict, *tokenizer_); }), HasSubstr("weight of"));
  strict.files[0] = {(folder_ / "nowhere.jsonl").string(), 1};
  EXPECT_THAT(message_of([&] { Dataset::open(strict, *tokenizer_); }), HasSubstr("nowhere.jsonl"));
}

TEST_F(DatasetTest, KeepsTargetsOfClassificationRows) {
  DatasetOptions options =
      this->options({R"({"text": "a", "label": 2})", R"({"text": "the b", "label": 0})"});
  options.reader.task = Task::kClassification;
  const auto data = Dataset::open(options, *tokenizer_);
  EXPECT_EQ(data->task(), Task::kClassification);
  EvaluationLoader loader(data, {.micro_batch_tokens = 100});
  const auto batch = loader.next();
  EXPECT_THAT(batch->targets, ::testing::ElementsAre(2, 0));
  EXPECT_EQ(batch->loss_rows, 2);
  LoaderOptions training;
  Loader steps(data, training);
  EXPECT_EQ(steps.next()->loss_weight_sum, 2);
}

TEST_F(DatasetTest, ReadsTheExampleData) {
  DatasetOptions options;
  const std::string examples = heddle::testing::source_path("examples/");
  options.files = {{examples + "text/stories.jsonl.gz", 1},
                   {examples + "text/docstrings.jsonl.gz", 1},
                   {examples + "instructions/train.jsonl", 1},
                   {examples + "instructions/hard-train.jsonl", 1}};
  const auto tokenizer = make_tokenizer(testing::chatml_template());
  const auto data = Dataset::open(options, *tokenizer);
  EXPECT_GT(data->rows(), 12'000);
  EXPECT_EQ(data->report().bad_rows, 0);
}

}  // namespace
}  // namespace heddle::data
