// Publications that come while the receiver goes on with the weights that it has.
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "damaging_channel.h"
#include "meet.h"
#include "sync/weight_sync.h"
#include "weights.h"

namespace heddle::sync {
namespace {

using ::testing::AllOf;
using testing::DamagingChannel;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::run_sides;
using testing::Weights;

constexpr std::int64_t kRollouts = 2;
const SyncOptions kStaged = {4096, true};

/// The sender's end, which does something else in place of bucket `number` of the second version.
class FailingChannel final : public testing::HandingChannel {
 public:
  FailingChannel(std::unique_ptr<Channel> channel, std::int64_t number, std::function<void()> work)
      : HandingChannel(std::move(channel)), number_(number), work_(std::move(work)) {}
  comm::Pending start_broadcast(at::Tensor& words, std::int64_t root) override {
    if (count_++ != number_) return HandingChannel::start_broadcast(words, root);
    work_();
    throw_error<CommError>("the sender is gone");
  }

 private:
  std::int64_t number_, count_ = 0;
  std::function<void()> work_;
};

/// Bucket 2 of the second of two publications, counted with the warm-up's: one for each member.
constexpr std::int64_t kThirdOfSecond = 1 + kRollouts + 5 + 2;

/// Publishes version 1 and then 2.
void publish_two(std::unique_ptr<Channel> channel) {
  const Weights weights;
  Publisher publisher(comm::Group("trainers"), weights.parts(), {4096, false});
  publisher.connect(std::move(channel), 0);
  for (const auto& [version, value] : {std::pair(1, 1.0), {2, 2.0}}) {
    weights.fill(value);
    ASSERT_EQ(publisher.publish(version).buckets, 5);
  }
}

/// Expects a second publication to fail, and the first to stay.
void expect_the_first_stays(Subscriber& subscriber, const Weights& weights) {
  EXPECT_EQ(subscriber.receive(), 1);
  const std::uint64_t hash = subscriber.weights_hash();
  subscriber.start();
  EXPECT_THROW(subscriber.await(), CommError);
  EXPECT_FALSE(subscriber.has_come());
  EXPECT_EQ(subscriber.version(), 1);
  EXPECT_EQ(subscriber.weights_hash(), hash);
  EXPECT_TRUE(subscriber.is_intact());
  EXPECT_TRUE(weights.all_are(1));
  EXPECT_THROW(subscriber.start(), CommError) << "a channel that failed is never used again";
}

TEST(WeightSyncBeside, WeightsChangeAtTheFinishAndNotBefore) {
  std::promise<void> looked;
  std::uint64_t sent = 0, received = 0;
  const auto errors = run_sides(
      kRollouts,
      [&](std::unique_ptr<Channel> channel) {
        const Weights weights;
        Publisher publisher(comm::Group("trainers"), weights.parts(), {4096, false});
        publisher.connect(std::move(channel), 0);
        weights.fill(1);
        publisher.publish(1);
        weights.fill(2);
        looked.get_future().wait();
        sent = publisher.publish(2).weights_hash;
        weights.fill(3);
        publisher.publish(3);
      },
      [&](std::unique_ptr<Channel> channel, std::int64_t number) {
        const Weights weights;
        const void* const address = weights.c.data_ptr();
        Subscriber subscriber(weights.parts(), kStaged);
        subscriber.connect(std::move(channel), 0);
        EXPECT_EQ(subscriber.receive(), 1);
        const std::uint64_t first = subscriber.weights_hash();
        subscriber.start();
        if (number == 0) {
          EXPECT_FALSE(subscriber.has_come());
          looked.set_value();
        }
        do {
          std::this_thread::yield();
          ASSERT_TRUE(weights.all_are(1));
          ASSERT_EQ(subscriber.weights_hash(), first);
        } while (!subscriber.has_come());
        EXPECT_EQ(subscriber.await(), 2);
        EXPECT_EQ(subscriber.version(), 1);
        EXPECT_TRUE(weights.all_are(1));
        EXPECT_EQ(subscriber.finish(), 2);
        EXPECT_EQ(subscriber.version(), 2);
        EXPECT_TRUE(weights.all_are(2));
        if (number == 0) received = subscriber.weights_hash();
        // One that waits for it comes after it.
        EXPECT_EQ(subscriber.receive(), 3);
        EXPECT_TRUE(weights.all_are(3));
        EXPECT_EQ(weights.c.data_ptr(), address);
      });
  EXPECT_THAT(errors, Each(""));
  EXPECT_EQ(sent, received);
}

TEST(WeightSyncBeside, DamagedBucketsComeOnceMore) {
  const auto errors = run_sides(
      kRollouts, [](std::unique_ptr<Channel> channel) { publish_two(std::move(channel)); },
      [&](std::unique_ptr<Channel> channel, std::int64_t number) {
        const Weights weights;
        Subscriber subscriber(weights.parts(), kStaged);
        subscriber.connect(std::make_unique<DamagingChannel>(
                               std::move(channel),
                               [&](std::int64_t bucket) { return number == 1 && bucket == 7; }),
                           0);
        EXPECT_EQ(subscriber.receive(), 1);
        subscriber.start();
        EXPECT_EQ(subscriber.await(), 2);
        subscriber.finish();
        EXPECT_TRUE(weights.all_are(2));
      });
  EXPECT_THAT(errors, Each(""));
}

TEST(WeightSyncBeside, WhatIsDamagedTwiceLeavesTheWeightsBefore) {
  const auto errors = run_sides(
      kRollouts, [](std::unique_ptr<Channel> channel) { publish_two(std::move(channel)); },
      [&](std::unique_ptr<Channel> channel, std::int64_t number) {
        const Weights weights;
        Subscriber subscriber(weights.parts(), kStaged);
        subscriber.connect(
            std::make_unique<DamagingChannel>(
                std::move(channel), [&](std::int64_t bucket) { return number == 0 && bucket > 6; }),
            0);
        expect_the_first_stays(subscriber, weights);
      });
  EXPECT_THAT(errors[0],
              AllOf(HasSubstr("version 2 is not published"), HasSubstr("damaged twice")));
}

TEST(WeightSyncBeside, ASenderThatDiesLeavesTheWeightsBefore) {
  const auto errors = run_sides(
      kRollouts,
      [](std::unique_ptr<Channel> channel) {
        publish_two(std::make_unique<FailingChannel>(std::move(channel), kThirdOfSecond, [] {}));
      },
      [&](std::unique_ptr<Channel> channel, std::int64_t) {
        const Weights weights;
        Subscriber subscriber(weights.parts(), kStaged);
        subscriber.connect(std::move(channel), 0);
        expect_the_first_stays(subscriber, weights);
      });
  EXPECT_THAT(errors[0], HasSubstr("the sender is gone"));
}

TEST(WeightSyncBeside, ASenderThatFallsSilentIsMissedByTheDeadline) {
  std::promise<void> missed[kRollouts];
  const auto errors = run_sides(
      kRollouts,
      [&](std::unique_ptr<Channel> channel) {
        publish_two(std::make_unique<FailingChannel>(std::move(channel), kThirdOfSecond, [&] {
          for (std::promise<void>& one : missed) one.get_future().wait();
        }));
      },
      [&](std::unique_ptr<Channel> channel, std::int64_t number) {
        const Weights weights;
        Subscriber subscriber(weights.parts(), kStaged);
        subscriber.connect(std::move(channel), 0);
        expect_the_first_stays(subscriber, weights);
        missed[number].set_value();
      },
      /*timeout_s=*/8);
  EXPECT_THAT(errors[0], HasSubstr("the sender is gone"));
}

TEST(WeightSyncBeside, OneThatIsUnderWayEndsBeforeItsReceiver) {
  const auto errors = run_sides(
      1, [](std::unique_ptr<Channel> channel) { publish_two(std::move(channel)); },
      [&](std::unique_ptr<Channel> channel, std::int64_t) {
        const Weights weights;
        {
          Subscriber subscriber(weights.parts(), kStaged);
          subscriber.connect(std::move(channel), 0);
          EXPECT_EQ(subscriber.receive(), 1);
          subscriber.start();
        }
        EXPECT_TRUE(weights.all_are(1));
      });
  EXPECT_THAT(errors, Each(""));
}

TEST(WeightSyncBeside, NeedsASecondCopy) {
  const Weights weights;
  EXPECT_FALSE(Subscriber(weights.parts(), {4096, false}).receives_beside());
  EXPECT_TRUE(Subscriber(weights.parts(), kStaged).receives_beside());
}

}  // namespace
}  // namespace heddle::sync
