#include "rl/batch_bytes.h"

#include <gtest/gtest.h>

#include "base/errors.h"

namespace heddle::rl {
namespace {

TEST(BatchBytesTest, ComesBackAsItWas) {
  Batch batch;
  batch.groups.push_back({.cursor = 7, .attempt = 2, .row = 3});
  batch.groups.back().trajectories.push_back({.tokens = {1, 2, 248319},
                                              .logprobs = {-0.1, -1e-30, -17.25},
                                              .versions = {4, 4, 5},
                                              .supports = {{1, 9}, {2}, {7, 248319}},
                                              .experts = {0, 255, 256, 511, 65535, 3},
                                              .sampled = {1, 0, 1},
                                              .turns = {{"a \xE2", "seen"}, {"", "b"}},
                                              .text = "half a character \xE2\x82",
                                              .is_truncated = true,
                                              .reward = 0.1,
                                              .parts = {{"exact", 1.0 / 3}}});
  batch.counts = {
      .tokens = 3,
      .groups = 1,
      .filtered = 13,
      .failed = 14,
      .stale = 2,
      .filtered_tokens = 130,
      .failed_tokens = 140,
      .stale_tokens = 20,
      .all_right = 15,
      .all_wrong = 16,
      .seconds = 0.5,
      .judging_s = 0.25,
      .elapsed_s = 0.75,
      .running = 6,
      .queued = 9,
      .capacity = 4,
      .queue_age_s = 1.5,
      .paused_s = 2.5,
      .prefill_saved = 77,
      .engine = {.draws = 5, .recorded_draws = 3, .drawn_sequences = 40, .preempted = 2}};
  batch.fates.push_back({.kind = Fate::Kind::kDispatched, .dispatch = {7, 2, ~0ull, 4}});
  batch.fates.push_back({.kind = Fate::Kind::kRejected,
                         .dispatch = {.cursor = 6},
                         .reason = Rejection::kFiltered,
                         .tokens = 12});
  batch.state = {{"next_cursor", 8}, {"pending", {{5, 1}}}};
  const std::string bytes = to_bytes(batch);
  const Batch found = batch_from_bytes(bytes);
  ASSERT_EQ(found.groups.size(), 1u);
  const Trajectory &one = batch.groups[0].trajectories[0], &other = found.groups[0].trajectories[0];
  EXPECT_EQ(found.groups[0].cursor, 7);
  EXPECT_EQ(found.groups[0].attempt, 2);
  EXPECT_EQ(found.groups[0].row, 3);
  EXPECT_EQ(other.tokens, one.tokens);
  EXPECT_EQ(other.logprobs, one.logprobs);
  EXPECT_EQ(other.versions, one.versions);
  EXPECT_EQ(other.supports, one.supports);
  EXPECT_EQ(other.experts, one.experts);
  EXPECT_EQ(other.sampled, one.sampled);
  EXPECT_EQ(other.turns, one.turns);
  EXPECT_EQ(other.text, one.text);
  EXPECT_TRUE(other.is_truncated);
  EXPECT_EQ(other.reward, one.reward);
  EXPECT_EQ(other.parts, one.parts);
  EXPECT_EQ(found.counts, batch.counts);
  ASSERT_EQ(found.fates.size(), 2u);
  EXPECT_EQ(found.fates[0].dispatch, batch.fates[0].dispatch);
  EXPECT_EQ(found.fates[1].reason, Rejection::kFiltered);
  EXPECT_EQ(found.state, batch.state);
  EXPECT_EQ(to_bytes(found), bytes);
}

TEST(BatchBytesTest, DamageIsAnError) {
  const std::string bytes = to_bytes({});
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_THROW(batch_from_bytes(bytes.substr(0, length)), CommError) << length;
}

}  // namespace
}  // namespace heddle::rl
