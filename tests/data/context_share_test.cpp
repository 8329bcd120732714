#include "data/context_share.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace heddle::data {
namespace {

using ops::ContextMethod;
using ops::ContextPlan;
using ::testing::ElementsAre;

/// Sequences of these lengths with tokens 0, 1, 2, ...; every token but the last of each has a
/// label.
Batch batch_of(const std::vector<std::int64_t>& lengths, bool with_targets = false,
               BatchCapacity capacity = {}) {
  std::vector<std::vector<std::int32_t>> tokens;
  std::vector<std::vector<float>> weights;
  std::int32_t next = 0;
  for (const std::int64_t length : lengths) {
    tokens.emplace_back(length);
    std::iota(tokens.back().begin(), tokens.back().end(), next);
    next += static_cast<std::int32_t>(length);
    weights.emplace_back(length, 1.0F);
  }
  std::vector<SequenceView> views;
  for (std::size_t i = 0; i < tokens.size(); ++i)
    views.push_back({tokens[i], tokens[i], weights[i], static_cast<std::int64_t>(i), 0.5 + i});
  return Batch::from_sequences(views, capacity, with_targets);
}

Batch share_of(const Batch& whole, std::int64_t ranks, std::int64_t rank,
               ContextMethod method = ContextMethod::kState) {
  return context_share(whole, ContextPlan(method, whole.cu_seqlens_host, ranks, rank));
}

at::Tensor longs(const std::vector<std::int64_t>& values) { return at::tensor(values, at::kLong); }

TEST(ContextShare, TakesTheSegmentsOfTheRankWithTheirPositionsAndLabels) {
  const Batch whole = batch_of({10, 6});
  const Batch share = share_of(whole, 2, 1);  // tokens 4..12
  EXPECT_TRUE(at::equal(share.tokens, longs({4, 5, 6, 7, 8, 9, 10, 11})));
  EXPECT_TRUE(at::equal(share.position_ids, longs({4, 5, 6, 7, 8, 9, 0, 1})));
  EXPECT_THAT(share.cu_seqlens_host, ElementsAre(0, 4, 6, 8));
  EXPECT_EQ(share.labels[5].item<std::int64_t>(), kIgnoredLabel);
  EXPECT_EQ(share.loss_rows, 7);
  EXPECT_EQ(share.loss_weight_sum, 7);
  EXPECT_EQ(share.max_seqlen, 4);
  EXPECT_THAT(share.last_tokens, ElementsAre(5));
  EXPECT_THAT(share.row_ids, ElementsAre(0));
}

TEST(ContextShare, SumsOverTheRanksAreThoseOfTheBatch) {
  for (const bool with_targets : {false, true}) {
    const Batch whole = batch_of({3, 17, 1, 8}, with_targets, {.tokens = 40, .sequences = 0});
    for (const auto method : {ContextMethod::kState, ContextMethod::kUlysses}) {
      std::int64_t tokens = 0, real = 0, rows = 0, ends = 0;
      double weight = 0, target = 0;
      for (std::int64_t rank = 0; rank < 3; ++rank) {
        const Batch share = share_of(whole, 3, rank, method);
        tokens += share.size();
        real += share.real_tokens;
        rows += share.loss_rows;
        ends += share.real_sequences;
        weight += share.loss_weight_sum;
        target = std::accumulate(share.targets.begin(), share.targets.end(), target);
        // The dummy tail is after the real tokens of every rank.
        EXPECT_EQ(share.tokens.narrow(0, share.real_tokens, share.size() - share.real_tokens)
                      .abs()
                      .sum()
                      .item<std::int64_t>(),
                  0);
      }
      EXPECT_EQ(tokens, 40);
      EXPECT_EQ(real, 29);
      EXPECT_EQ(rows, whole.loss_rows);
      EXPECT_EQ(ends, 4);
      EXPECT_EQ(weight, whole.loss_weight_sum);
      EXPECT_EQ(target, with_targets ? 0.5 + 1.5 + 2.5 + 3.5 : 0);
    }
  }
}

TEST(ContextShare, AShortBatchGetsADummyTail) {
  const Batch batch = with_dummy_tail(batch_of({2}), 6);
  EXPECT_THAT(batch.cu_seqlens_host, ElementsAre(0, 2, 6));
  EXPECT_TRUE(at::equal(batch.position_ids, longs({0, 1, 0, 1, 2, 3})));
  EXPECT_EQ(batch.real_tokens, 2);
  const Batch last = share_of(batch, 3, 2);  // tokens 2 and 3
  EXPECT_EQ(last.real_tokens, 0);
  EXPECT_EQ(last.real_sequences, 0);
  EXPECT_EQ(last.loss_rows, 0);
}

}  // namespace
}  // namespace heddle::data
