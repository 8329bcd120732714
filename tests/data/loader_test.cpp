#include "data/loader/loader.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "loader_fixture.h"
#include "testing/temporary_directory.h"

namespace heddle::data {
namespace {

using heddle::testing::TemporaryDirectory;
using ::testing::HasSubstr;
using testing::make_tokenizer;
using testing::numbered_rows;
using testing::open_rows;
using testing::to_list;
using testing::write_lines;

template <class F>
std::string error_of(F&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

/// All that a training loop sees of a step, as text.
std::string describe(const Step& step) {
  std::string text =
      fmt::format("{} {} {} {} {} {} {}", step.step, step.epoch, step.loss_weight_sum,
                  step.loss_rows, step.tokens, step.sequences, step.rows);
  for (const Batch& batch : step.micro_batches) {
    text += "|";
    for (const auto& list : {to_list(batch.tokens), to_list(batch.cu_seqlens), batch.row_ids}) {
      for (const std::int64_t value : list) text += fmt::format("{} ", value);
    }
  }
  return text;
}

std::vector<std::string> run(Loader& loader, int most = 1 << 30) {
  std::vector<std::string> steps;
  while (most-- > 0) {
    const auto step = loader.next();
    if (!step) break;
    steps.push_back(describe(*step));
  }
  return steps;
}

class LoaderTest : public ::testing::Test {
 protected:
  std::shared_ptr<const Dataset> rows(int count, int longest = 29, std::uint64_t seed = 1) {
    return open_rows(write_lines(folder_ / "rows.jsonl", numbered_rows(count, longest, seed)),
                     *tokenizer_);
  }
  TemporaryDirectory folder_;
  std::shared_ptr<const Tokenizer> tokenizer_ = make_tokenizer();
};

TEST_F(LoaderTest, GivesEveryRowOncePerEpoch) {
  const auto data = rows(101);
  for (const bool packing : {false, true}) {
    LoaderOptions options;
    options.global_batch_size = 7;
    options.micro_batch_tokens = 64;
    options.packing = packing;
    options.max_length = 64;
    options.packing_window = 40;
    options.epochs = 2;
    options.seed = 3;
    Loader loader(data, options);
    std::map<std::int64_t, std::vector<std::int64_t>> seen;
    std::int64_t steps = 0;
    while (const auto step = loader.next()) {
      EXPECT_EQ(step->step, steps++);
      EXPECT_LE(step->rows, 7);
      std::int64_t tokens = 0, loss_rows = 0, sequences = 0;
      double weights = 0;
      for (const Batch& batch : step->micro_batches) {
        EXPECT_LE(batch.size(), 64);
        tokens += batch.real_tokens;
        loss_rows += batch.loss_rows;
        weights += batch.loss_weight_sum;
        sequences += batch.real_sequences;
        for (std::int64_t s = 0; s < batch.real_sequences; ++s) {
          const std::int64_t row = batch.row_ids[s];
          seen[step->epoch].push_back(row);
          const auto begin = batch.cu_seqlens_host[s];
          EXPECT_EQ(batch.cu_seqlens_host[s + 1] - begin, data->lengths()[row]);
          EXPECT_EQ(to_list(batch.tokens)[begin], row % 250);
          EXPECT_EQ(to_list(batch.position_ids)[begin], 0);
          EXPECT_EQ(to_list(batch.labels)[batch.cu_seqlens_host[s + 1] - 1], -100);
        }
      }
      EXPECT_EQ(step->tokens, tokens);
      EXPECT_EQ(step->loss_rows, loss_rows);
      EXPECT_EQ(step->sequences, sequences);
      EXPECT_DOUBLE_EQ(step->loss_weight_sum, weights);
    }
    EXPECT_EQ(steps, loader.info().total_steps);
    ASSERT_EQ(seen.size(), 2u);
    EXPECT_NE(seen[0], seen[1]);
    for (auto& [epoch, order] : seen) {
      EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
      std::sort(order.begin(), order.end());
      ASSERT_EQ(order.size(), 101u);
      for (std::int64_t i = 0; i < 101; ++i) EXPECT_EQ(order[i], i);
    }
    EXPECT_EQ(loader.info().tokens_per_epoch, data->report().tokens);
    if (packing) {
      EXPECT_LT(loader.info().rows_per_epoch, 40);
      EXPECT_GT(loader.info().packing_efficiency, 0.85);
      EXPECT_LE(loader.info().packing_efficiency, 1);
    } else {
      EXPECT_EQ(loader.info().steps_per_epoch, 15);
    }
  }
}

TEST_F(LoaderTest, ResumesAnywhereAsIfUndisturbed) {
  const auto data = rows(53);
  for (const bool packing : {false, true}) {
    for (const int prefetch : {0, 3}) {
      LoaderOptions options;
      options.global_batch_size = 4;
      options.micro_batch_tokens = 64;
      options.packing = packing;
      options.max_length = 40;
      options.packing_window = 16;
      options.epochs = 3;
      options.prefetch_steps = prefetch;
      Loader whole(data, options);
      const auto expected = run(whole);
      ASSERT_GT(expected.size(), 10u);
      for (std::size_t at = 0; at <= expected.size(); ++at) {
        Loader first(data, options);
        run(first, static_cast<int>(at));
        const std::string cursor = first.cursor().dump();
        Loader second(data, options);
        run(second, 2);  // wherever it stood before
        second.seek(nlohmann::json::parse(cursor));
        EXPECT_EQ(run(second),
                  std::vector(expected.begin() + static_cast<std::ptrdiff_t>(at), expected.end()));
      }
    }
  }
}

TEST_F(LoaderTest, ResumesWithAnotherBatchSizeAndRefusesAnotherOrder) {
  const auto data = rows(53);
  LoaderOptions options;
  options.global_batch_size = 4;
  Loader loader(data, options);
  std::multiset<std::int64_t> seen;
  const auto collect = [&](Loader& from, int most) {
    for (int i = 0; i < most; ++i) {
      const auto step = from.next();
      if (!step) return;
      for (const Batch& batch : step->micro_batches) {
        seen.insert(batch.row_ids.begin(), batch.row_ids.end());
      }
    }
  };
  collect(loader, 3);
  const nlohmann::json cursor = loader.cursor();
  options.global_batch_size = 9;
  Loader other(data, options);
  other.seek(cursor);
  collect(other, 1000);
  EXPECT_EQ(seen.size(), 53u);
  EXPECT_EQ(std::set(seen.begin(), seen.end()).size(), 53u);

  options.seed = 9;
  Loader reseeded(data, options);
  EXPECT_THAT(error_of([&] { reseeded.seek(cursor); }), HasSubstr("seed was 0, is 9"));
  options.seed = 0;
  Loader changed(rows(53, 29, 77), options);
  EXPECT_THAT(error_of([&] { changed.seek(cursor); }), HasSubstr("data was"));
  EXPECT_THAT(error_of([&] { changed.seek(nlohmann::json::object()); }),
              HasSubstr("cannot be read"));
}

TEST_F(LoaderTest, DealsTheSameRowsToAnyNumberOfRanks) {
  const auto data = rows(61);
  for (const bool packing : {false, true}) {
    LoaderOptions options;
    options.global_batch_size = 6;
    options.micro_batch_tokens = 64;
    options.packing = packing;
    options.max_length = 50;
    std::vector<std::multiset<std::int64_t>> expected;
    std::vector<double> weights;
    Loader single(data, options);
    while (const auto step = single.next()) {
      expected.emplace_back();
      for (const Batch& batch : step->micro_batches) {
        expected.back().insert(batch.row_ids.begin(), batch.row_ids.end());
      }
      weights.push_back(step->loss_weight_sum);
    }
    for (const int world : {2, 4, 9}) {
      options.world = world;
      std::vector<std::unique_ptr<Loader>> ranks;
      for (int rank = 0; rank < world; ++rank) {
        options.rank = rank;
        ranks.push_back(std::make_unique<Loader>(data, options));
      }
      for (std::size_t s = 0; s < expected.size(); ++s) {
        std::multiset<std::int64_t> rows;
        double local = 0;
        std::size_t micro_batches = 0;
        for (int rank = 0; rank < world; ++rank) {
          const auto step = ranks[rank]->next();
          ASSERT_TRUE(step);
          EXPECT_DOUBLE_EQ(step->loss_weight_sum, weights[s]);
          if (rank == 0) micro_batches = step->micro_batches.size();
          EXPECT_EQ(step->micro_batches.size(), micro_batches);
          for (const Batch& batch : step->micro_batches) {
            EXPECT_GE(batch.size(), 1);
            rows.insert(batch.row_ids.begin(), batch.row_ids.end());
            local += batch.loss_weight_sum;
          }
        }
        EXPECT_EQ(rows, expected[s]);
        EXPECT_DOUBLE_EQ(local, weights[s]);
      }
      for (auto& rank : ranks) EXPECT_FALSE(rank->next());
    }
    options.world = 1;
    options.rank = 0;
  }
}

TEST_F(LoaderTest, SeesFilesAsOftenAsTheirWeightsSay) {
  const auto a = write_lines(folder_ / "a.jsonl", numbered_rows(40, 9, 1));
  const auto b = write_lines(folder_ / "b.jsonl", numbered_rows(30, 9, 2));
  const auto c = write_lines(folder_ / "c.jsonl", {"this is not even JSON"});
  DatasetOptions data_options;
  data_options.files = {{a.string(), 0.25}, {c.string(), 0}, {b.string(), 2.5}};
  const auto data = Dataset::open(data_options, *tokenizer_);
  EXPECT_EQ(data->rows(), 70);
  EXPECT_EQ(data->place(69).file, b.string());
  EXPECT_EQ(data->place(69).line, 30);
  LoaderOptions options;
  options.epochs = 2;
  Loader loader(data, options);
  EXPECT_EQ(loader.info().sequences_per_epoch, 10 + 75);
  std::map<std::int64_t, std::map<std::int64_t, int>> seen;
  while (const auto step = loader.next()) {
    for (const Batch& batch : step->micro_batches) {
      for (const std::int64_t row : batch.row_ids) ++seen[step->epoch][row];
    }
  }
  std::set<std::int64_t> parts[2];
  for (const int epoch : {0, 1}) {
    int from_a = 0, thrice = 0;
    for (const auto& [row, count] : seen[epoch]) {
      if (row < 40) {
        from_a += count;
        EXPECT_EQ(count, 1);
        parts[epoch].insert(row);
      } else {
        thrice += count == 3;
        EXPECT_GE(count, 2);
      }
    }
    EXPECT_EQ(from_a, 10);
    EXPECT_EQ(thrice, 15);
  }
  EXPECT_NE(parts[0], parts[1]) << "every epoch draws its own part";
}

TEST_F(LoaderTest, StopsAtMaxStepsAndRunsWithoutEnd) {
  const auto data = rows(5);
  LoaderOptions options;
  options.global_batch_size = 2;
  options.epochs = 0;
  options.max_steps = 8;
  Loader loader(data, options);
  EXPECT_EQ(loader.info().total_steps, 8);
  EXPECT_EQ(run(loader).size(), 8u);
  EXPECT_FALSE(loader.next());
  options.epochs = 2;
  Loader shorter(data, options);
  EXPECT_EQ(shorter.info().total_steps, 6);
  EXPECT_EQ(run(shorter).size(), 6u);
}

TEST_F(LoaderTest, FillsStaticCapacities) {
  const auto data = rows(41);
  LoaderOptions options;
  options.global_batch_size = 9;
  options.capacity = {.tokens = 50, .sequences = 4};
  Loader loader(data, options);
  while (const auto step = loader.next()) {
    for (const Batch& batch : step->micro_batches) {
      EXPECT_EQ(batch.size(), 50);
      EXPECT_EQ(batch.sequences(), 4);
      EXPECT_LE(batch.real_sequences, 3);
    }
  }
}

TEST_F(LoaderTest, RefusesOptionsThatDoNotFitTheData) {
  const auto data = rows(20, 29);
  const auto complain = [&](auto change) {
    LoaderOptions options;
    change(options);
    return error_of([&] { Loader loader(data, options); });
  };
  EXPECT_THAT(complain([](auto& o) { o.micro_batch_tokens = 8; }),
              HasSubstr("tokens but a micro-batch holds 8"));
  EXPECT_THAT(complain([](auto& o) { o.packing = true; }), HasSubstr("needs data.max_length"));
  EXPECT_THAT(complain([](auto& o) {
                o.packing = true;
                o.max_length = 5;
              }),
              HasSubstr("longest row"));
  EXPECT_THAT(complain([](auto& o) {
                o.packing = true;
                o.max_length = 64;
                o.micro_batch_tokens = 63;
              }),
              HasSubstr("raise train.micro_batch_tokens"));
  EXPECT_THAT(complain([](auto& o) {
                o.rank = 2;
                o.world = 2;
              }),
              HasSubstr("rank 2 of 2"));
  EXPECT_THAT(complain([](auto& o) { o.epochs = 0; }), HasSubstr("max_steps must be set"));
  EXPECT_THAT(complain([](auto& o) { o.global_batch_size = 0; }),
              HasSubstr("global_batch_size is 0"));
}

TEST_F(LoaderTest, EvaluatesEveryRowInOrder) {
  const auto data = rows(37);
  for (const int world : {1, 3}) {
    std::map<std::int64_t, std::vector<std::int64_t>> by_round;
    std::int64_t batches = -1;
    for (int rank = 0; rank < world; ++rank) {
      EvaluationLoader loader(data, {.micro_batch_tokens = 60, .rank = rank, .world = world});
      if (batches < 0) batches = loader.batches();
      EXPECT_EQ(loader.batches(), batches);
      for (int pass = 0; pass < 2; ++pass) {
        loader.rewind();
        std::int64_t round = 0;
        while (const auto batch = loader.next()) {
          EXPECT_LE(batch->size(), 60);
          if (pass == 0) {
            auto& rows = by_round[round * world + rank];
            rows.insert(rows.end(), batch->row_ids.begin(), batch->row_ids.end());
          }
          ++round;
        }
        EXPECT_EQ(round, batches);
      }
    }
    std::vector<std::int64_t> order;
    for (const auto& [number, rows] : by_round) order.insert(order.end(), rows.begin(), rows.end());
    ASSERT_EQ(order.size(), 37u);
    for (std::int64_t i = 0; i < 37; ++i) EXPECT_EQ(order[i], i);
  }
  EvaluationLoader some(data, {.micro_batch_tokens = 0, .max_rows = 5});
  EXPECT_EQ(some.batches(), 5);
  EXPECT_THAT(error_of([&] { EvaluationLoader(data, {.micro_batch_tokens = 4}); }),
              HasSubstr("micro-batch holds 4"));
}

TEST_F(LoaderTest, StopsItsThreadWhenItIsNotReadToTheEnd) {
  const auto data = rows(500);
  for (int i = 0; i < 20; ++i) {
    LoaderOptions options;
    options.epochs = 100;
    Loader loader(data, options);
    run(loader, i % 3);
  }
}

class DatasetTest : public LoaderTest {
 protected:
  DatasetOptions options(const std::vector<std::string>& lines) {
    DatasetOptions options;
    options.files = {{write_lines(folder_ / "data.jsonl", lines).string(), 1}};
    options.cache_directory = (folder_ / "cache").string();
    return options;
  }
};

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
  // What an interrupted run leaves is never taken for a cache.
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
  EXPECT_THAT(error_of([&] { Dataset::open(strict, *tokenizer_); }),
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

TEST_F(DatasetTest, ADataSetWithoutLossTokensIsAnError) {
  EXPECT_THAT(error_of([&] {
                Dataset::open(options({R"({"input_ids": [1, 2], "labels": [1, -100]})"}),
                              *tokenizer_);
              }),
              HasSubstr("no token of the data set carries loss"));
  EXPECT_THAT(error_of([&] { Dataset::open(options({}), *tokenizer_); }),
              HasSubstr("data set is empty"));
  DatasetOptions strict = options({R"({"input_ids": [1, 2, 3]})"});
  strict.rendering.max_length = 2;
  EXPECT_THAT(error_of([&] { Dataset::open(strict, *tokenizer_); }),
              HasSubstr("1 dropped as too long"));
  strict.files[0].weight = -1;
  EXPECT_THAT(error_of([&] { Dataset::open(strict, *tokenizer_); }), HasSubstr("weight of"));
  strict.files[0] = {(folder_ / "nowhere.jsonl").string(), 1};
  EXPECT_THAT(error_of([&] { Dataset::open(strict, *tokenizer_); }), HasSubstr("nowhere.jsonl"));
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
  const std::string examples = std::string(HEDDLE_SOURCE_DIR) + "/examples/";
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
