#include "data/loader/loader.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "loader_fixture.h"
#include "testing/message_of.h"
#include "testing/temporary_directory.h"

namespace heddle::data {
namespace {

using heddle::testing::message_of;
using heddle::testing::TemporaryDirectory;
using ::testing::HasSubstr;
using testing::make_tokenizer;
using testing::numbered_rows;
using testing::open_rows;
using testing::to_list;
using testing::write_lines;

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
  EXPECT_THAT(message_of([&] { reseeded.seek(cursor); }), HasSubstr("seed was 0, is 9"));
  options.seed = 0;
  Loader changed(rows(53, 29, 77), options);
  EXPECT_THAT(message_of([&] { changed.seek(cursor); }),
              HasSubstr("rows.jsonl: 53 rows): a file was changed"));
  EXPECT_THAT(message_of([&] { changed.seek(nlohmann::json::object()); }),
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
    return message_of([&] { Loader loader(data, options); });
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
      std::int64_t round = 0;
      while (const auto batch = loader.next()) {
        EXPECT_LE(batch->size(), 60);
        auto& rows = by_round[round * world + rank];
        rows.insert(rows.end(), batch->row_ids.begin(), batch->row_ids.end());
        ++round;
      }
      EXPECT_EQ(round, batches);
    }
    std::vector<std::int64_t> order;
    for (const auto& [number, rows] : by_round) order.insert(order.end(), rows.begin(), rows.end());
    ASSERT_EQ(order.size(), 37u);
    for (std::int64_t i = 0; i < 37; ++i) EXPECT_EQ(order[i], i);
  }
  EvaluationLoader some(data, {.micro_batch_tokens = 0, .max_rows = 5});
  EXPECT_EQ(some.batches(), 5);
  EXPECT_THAT(message_of([&] { EvaluationLoader(data, {.micro_batch_tokens = 4}); }),
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

}  // namespace
}  // namespace heddle::data
