#include "parallel/pipeline_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

namespace heddle::parallel {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

TEST(PipelineSchedule, DoesEverythingOnceWhenItCanBeDone) {
  for (std::int64_t ranks = 1; ranks <= 4; ++ranks) {
    for (std::int64_t chunks = 1; chunks <= 3; ++chunks) {
      for (std::int64_t micro_batches = 1; micro_batches <= 9; ++micro_batches) {
        const PipelineSchedule schedule(ranks, chunks, micro_batches);
        SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << chunks << " chunks, "
                                          << micro_batches << " micro-batches");
        std::map<std::tuple<bool, std::int64_t, std::int64_t>, PipelineAction> done;
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          std::int64_t free = 0;
          std::map<std::int64_t, std::int64_t> last_backward;
          for (const PipelineAction& action : schedule.of(rank)) {
            EXPECT_GE(action.begin, free);
            free = action.end;
            const std::int64_t stage = action.chunk * ranks + rank;
            EXPECT_TRUE(
                done.emplace(std::tuple(action.is_backward, stage, action.micro_batch), action)
                    .second);
            if (!action.is_backward) continue;
            // Gradients are summed over ranks with the last micro-batch.
            EXPECT_EQ(last_backward[stage]++, action.micro_batch);
          }
        }
        const std::int64_t stages = ranks * chunks;
        ASSERT_EQ(done.size(), static_cast<std::size_t>(2 * stages * micro_batches));
        for (const auto& [key, action] : done) {
          const auto& [is_backward, stage, m] = key;
          if (is_backward) {
            EXPECT_GE(action.begin, done.at({false, stage, m}).end);
            if (stage + 1 < stages) {
              EXPECT_GE(action.begin, done.at({true, stage + 1, m}).end);
            }
          } else if (stage > 0) {
            EXPECT_GE(action.begin, done.at({false, stage - 1, m}).end);
          }
        }
      }
    }
  }
}

// Devices deliver the messages of one rank to another in the order in which they were sent.
TEST(PipelineSchedule, WhatARankSendsIsReceivedInTheSameOrder) {
  using Messages =
      std::vector<std::pair<std::int64_t, std::int64_t>>;  // sending stage, micro-batch
  for (std::int64_t ranks = 2; ranks <= 4; ++ranks) {
    for (std::int64_t chunks = 1; chunks <= 3; ++chunks) {
      for (std::int64_t micro_batches = 1; micro_batches <= 9; ++micro_batches) {
        const PipelineSchedule schedule(ranks, chunks, micro_batches);
        std::map<std::pair<std::int64_t, bool>, Messages> sent, received;  // by sending rank
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          for (const PipelineAction& action : schedule.of(rank)) {
            const std::int64_t stage = action.chunk * ranks + rank;
            const std::int64_t before = stage + (action.is_backward ? 1 : -1);
            const std::int64_t behind = stage + (action.is_backward ? -1 : 1);
            const auto exists = [&](std::int64_t s) { return s >= 0 && s < ranks * chunks; };
            if (exists(before)) {
              received[{before % ranks, action.is_backward}].emplace_back(before,
                                                                          action.micro_batch);
            }
            if (exists(behind))
              sent[{rank, action.is_backward}].emplace_back(stage, action.micro_batch);
          }
        }
        EXPECT_EQ(sent, received) << ranks << " ranks, " << chunks << " chunks, " << micro_batches
                                  << " micro-batches";
      }
    }
  }
}

// A message that has arrived may be dropped, and nobody may wait for it.
TEST(PipelineSchedule, KnowsWhatHasArrived) {
  for (std::int64_t ranks = 2; ranks <= 4; ++ranks) {
    for (std::int64_t chunks = 1; chunks <= 3; ++chunks) {
      std::map<std::int64_t, std::vector<std::size_t>> most;  // kept, by micro-batches and rank
      for (const std::int64_t micro_batches : {1L, 3L, 4 * ranks, 16 * ranks, 16 * ranks + 1}) {
        const PipelineSchedule schedule(ranks, chunks, micro_batches);
        SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << chunks << " chunks, "
                                          << micro_batches << " micro-batches");
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          std::vector<PipelineMessage> kept;
          std::size_t own_most = 0;
          for (const PipelineAction& action : schedule.of(rank)) {
            for (const PipelineMessage& message : action.arrived) {
              const auto sent = std::find(kept.begin(), kept.end(), message);
              ASSERT_NE(sent, kept.end());
              kept.erase(sent);
              // Whoever receives it has begun to do so, and has sent something since.
              const std::int64_t stage =
                  message.chunk * ranks + rank + (message.is_gradient ? -1 : 1);
              const auto& others = schedule.of(stage % ranks);
              const auto receiver =
                  std::find_if(others.begin(), others.end(), [&](const PipelineAction& a) {
                    return a.is_backward == message.is_gradient &&
                           a.micro_batch == message.micro_batch && a.chunk == stage / ranks;
                  });
              ASSERT_NE(receiver, others.end());
              EXPECT_LE(receiver->end, action.begin);
            }
            const std::int64_t stage = action.chunk * ranks + rank;
            if (action.is_backward ? stage > 0 : stage + 1 < ranks * chunks)
              kept.push_back({action.is_backward, action.micro_batch, action.chunk});
            own_most = std::max(own_most, kept.size());
          }
          most[micro_batches].push_back(own_most);
        }
      }
      EXPECT_EQ(most[16 * ranks], most[4 * ranks]) << ranks << " ranks, " << chunks << " chunks";
    }
  }
}

TEST(PipelineSchedule, OneForwardOneBackwardHoldsFewActivations) {
  const PipelineSchedule schedule(4, 1, 16);
  for (std::int64_t rank = 0; rank < 4; ++rank) EXPECT_EQ(schedule.most_in_flight(rank), 4 - rank);
  // (P - 1) (F + B) of idle time beside M (F + B).
  EXPECT_EQ(schedule.duration(), 19 * 3);
  EXPECT_NEAR(schedule.bubble(), 3.0 / 19, 1e-12);
}

TEST(PipelineSchedule, InterleavingShrinksTheBubble) {
  // As much work in twice the stages: the idle time halves.
  const PipelineSchedule plain(4, 1, 8), interleaved(4, 2, 8);
  EXPECT_LT(interleaved.bubble(), 0.65 * plain.bubble());
}

TEST(PipelineSchedule, IsDrawn) {
  EXPECT_THAT(PipelineSchedule(2, 1, 2).draw(), ElementsAre("01..aa.bb", ".0aa1bb.."));
}

TEST(BalancedStages, CountTheHead) {
  EXPECT_THAT(balanced_stages({1, 1, 1, 1, 1, 1}, 2, 2), ElementsAre(Pair(0, 4), Pair(4, 6)));
  EXPECT_THAT(balanced_stages({1, 1, 1, 1}, 2, 100), ElementsAre(Pair(0, 3), Pair(3, 4)));
  EXPECT_THAT(balanced_stages({1, 1, 1}, 3, 5), ElementsAre(Pair(0, 1), Pair(1, 2), Pair(2, 3)));
  EXPECT_THAT(balanced_stages({5, 1, 1, 1, 1, 1}, 2, 0), ElementsAre(Pair(0, 1), Pair(1, 6)));
}

}  // namespace
}  // namespace heddle::parallel
