#include <algorithm>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/rng.h"
#include "rl/admission.h"

namespace heddle::rl {
namespace {

using Cursors = std::vector<std::int64_t>;

AdmissionOptions options(std::int64_t staleness, std::int64_t groups, StalePolicy policy) {
  AdmissionOptions options;
  options.max_staleness = staleness;
  options.groups_per_batch = groups;
  options.policy = policy;
  return options;
}

TEST(Admission, AllowsKPlusOneBatches) {
  Admission admission(options(2, 4, StalePolicy::kWait));
  EXPECT_EQ(admission.capacity(), 12);
  for (std::int64_t cursor = 0; cursor < 12; ++cursor) admission.start(cursor, 0);
  EXPECT_EQ(admission.capacity(), 0);
  EXPECT_THROW(admission.start(12, 0), InternalError);
  for (std::int64_t cursor = 0; cursor < 4; ++cursor) EXPECT_TRUE(admission.finish(cursor, 0));
  ASSERT_TRUE(admission.cut(false));
  EXPECT_EQ(admission.capacity(), 0);
  EXPECT_TRUE(admission.publish().empty());
  EXPECT_EQ(admission.capacity(), 4);
}

TEST(Admission, WaitsForWhatWouldBeTooOld) {
  Admission admission(options(1, 2, StalePolicy::kWait));
  for (const std::int64_t cursor : {0, 1, 2, 3}) admission.start(cursor, 0);
  admission.finish(2, 0);
  admission.finish(3, 0);
  EXPECT_EQ(admission.cut(false)->cursors, (Cursors{2, 3}));
  admission.publish();
  admission.start(4, 1);
  admission.start(5, 1);
  admission.finish(4, 1);
  admission.finish(5, 1);
  EXPECT_FALSE(admission.cut(false));  // 0 and 1 run under version 0
  admission.finish(1, 0);
  EXPECT_FALSE(admission.cut(false));
  admission.finish(0, 0);
  EXPECT_EQ(admission.cut(false)->cursors, (Cursors{0, 1}));
}

TEST(Admission, DropsWhatWouldBeTooOld) {
  Admission admission(options(1, 2, StalePolicy::kDrop));
  for (const std::int64_t cursor : {0, 1, 2, 3}) admission.start(cursor, 0);
  admission.finish(2, 0);
  admission.finish(3, 0);
  admission.cut(false);
  admission.publish();
  admission.start(4, 1);
  admission.start(5, 1);
  admission.finish(4, 1);
  admission.finish(1, 0);
  const auto batch = admission.cut(false);
  EXPECT_EQ(batch->cursors, (Cursors{1, 4}));
  EXPECT_EQ(batch->dropped, (Cursors{0}));
  EXPECT_EQ(admission.running(), 1);
}

TEST(Admission, RefusesAGroupThatIsTooOldAlready) {
  Admission admission(options(1, 1, StalePolicy::kWait));
  admission.rebase(5);
  EXPECT_FALSE(admission.restore(0, 3));
  EXPECT_TRUE(admission.restore(1, 4));
  EXPECT_EQ(admission.queued(), 1);
}

TEST(Admission, ForgetsAtPublicationWhatALaggingRolloutStarted) {
  Admission admission(options(1, 1, StalePolicy::kWait));
  admission.rebase(5);
  admission.start(0, 5);
  admission.finish(0, 5);
  ASSERT_TRUE(admission.cut(false));
  admission.start(1, 4);
  EXPECT_EQ(admission.publish(), (Cursors{1}));
}

TEST(Admission, MakesASmallerLastBatch) {
  Admission admission(options(0, 4, StalePolicy::kWait));
  admission.start(0, 0);
  EXPECT_FALSE(admission.cut(true));
  admission.finish(0, 0);
  EXPECT_FALSE(admission.cut(false));
  EXPECT_EQ(admission.cut(true)->cursors, (Cursors{0}));
  EXPECT_THROW(admission.cut(true), InternalError);
}

TEST(Admission, BoundsWhatRuns) {
  AdmissionOptions bounded = options(1, 8, StalePolicy::kWait);
  bounded.max_inflight = 3;
  Admission admission(bounded);
  EXPECT_EQ(admission.capacity(), 3);
  admission.start(0, 0);
  admission.finish(0, 0);
  EXPECT_EQ(admission.capacity(), 3);
}

TEST(Admission, TellsWhatTheBoundWouldAdmitBesides) {
  AdmissionOptions bounded = options(1, 4, StalePolicy::kWait);
  bounded.max_inflight = 3;
  Admission admission(bounded);
  EXPECT_EQ(admission.room(), 8);
  for (const std::int64_t cursor : {0, 1, 2}) admission.start(cursor, 0);
  EXPECT_EQ(admission.capacity(), 0);
  EXPECT_EQ(admission.room(), 5);
  for (const std::int64_t cursor : {0, 1, 2}) admission.finish(cursor, 0);
  admission.start(3, 0);
  admission.finish(3, 0);
  ASSERT_TRUE(admission.cut(false));
  EXPECT_EQ(admission.room(), 4);
}

/// The batches of 30 groups that end in an order of the seed's, at most K + 1 batches at a time.
std::vector<Cursors> batches(const AdmissionOptions& options, std::uint64_t seed) {
  const CounterRng random(seed, "order");
  std::uint64_t drawn = 0;
  Admission admission(options);
  std::vector<Cursors> found;
  std::vector<std::pair<std::int64_t, std::int64_t>> running;  // cursor, version
  std::int64_t next = 0;
  while (next < 30 || admission.running() + admission.queued() > 0) {
    for (; next < 30 && admission.capacity() > 0; ++next) {
      admission.start(next, admission.version());
      running.emplace_back(next, admission.version());
    }
    if (!running.empty()) {
      const auto place = static_cast<std::ptrdiff_t>(random.below(drawn++, running.size()));
      const auto [cursor, version] = running[static_cast<std::size_t>(place)];
      admission.finish(cursor, version);
      running.erase(running.begin() + place);
    }
    if (const auto batch = admission.cut(next == 30)) {
      found.push_back(batch->cursors);
      admission.publish();
    }
  }
  return found;
}

TEST(Admission, BatchesInOrderDoNotDependOnWhoIsFaster) {
  AdmissionOptions ordered = options(2, 4, StalePolicy::kWait);
  ordered.in_order = true;
  const AdmissionOptions free = options(2, 4, StalePolicy::kWait);
  const std::vector<Cursors> first = batches(ordered, 0);
  ASSERT_EQ(first.size(), 8u);
  bool differs = false;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<Cursors> others = batches(free, seed);
    for (Cursors& batch : others) std::ranges::sort(batch);
    differs = differs || others != first;
    EXPECT_EQ(batches(ordered, seed), first) << seed;
  }
  EXPECT_TRUE(differs);
  for (std::size_t i = 0; i < first.size(); ++i)
    EXPECT_EQ(first[i].front(), static_cast<std::int64_t>(4 * i)) << i;
}

TEST(Admission, AGroupThatIsIssuedAgainComesAfterThoseOfOlderWeights) {
  AdmissionOptions ordered = options(1, 2, StalePolicy::kWait);
  ordered.in_order = true;
  Admission admission(ordered);
  for (const std::int64_t cursor : {0, 1, 2, 3}) admission.start(cursor, 0);
  for (const std::int64_t cursor : {0, 1, 3}) admission.finish(cursor, 0);
  EXPECT_EQ(admission.cut(false)->cursors, (Cursors{0, 1}));
  admission.publish();
  // Its rollout died.
  admission.forget(2);
  admission.start(2, 1);
  admission.start(4, 1);
  admission.finish(4, 1);
  EXPECT_FALSE(admission.cut(false));
  admission.finish(2, 1);
  EXPECT_EQ(admission.cut(false)->cursors, (Cursors{3, 2}));
}

TEST(Admission, RefusesOptionsOutOfRange) {
  EXPECT_THROW(Admission(options(-1, 1, StalePolicy::kWait)), ConfigError);
  EXPECT_THROW(Admission(options(0, 0, StalePolicy::kWait)), ConfigError);
}

}  // namespace
}  // namespace heddle::rl
