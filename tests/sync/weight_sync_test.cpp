#include "sync/weight_sync.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "base/errors.h"
#include "damaging_channel.h"
#include "meet.h"
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

SyncOptions small_buckets(bool staged = false) { return {4096, staged}; }

void expect_syncs(std::int64_t count) {
  std::vector<std::uint64_t> sent, received;
  const auto errors = run_sides(
      kRollouts,
      [&](std::unique_ptr<Channel> channel) {
        const Weights weights;
        Publisher publisher(comm::Group("trainers"), weights.parts(), small_buckets());
        publisher.connect(std::move(channel), 0);
        for (std::int64_t version = 1; version <= count; ++version) {
          weights.fill(static_cast<double>(version));
          const SyncReport report = publisher.publish(version);
          ASSERT_EQ(report.damaged, 0);
          ASSERT_EQ(report.buckets, 5);
          sent.push_back(report.weights_hash);
        }
      },
      [&](std::unique_ptr<Channel> channel, std::int64_t number) {
        const Weights weights;
        const void* const address = weights.c.data_ptr();
        Subscriber subscriber(weights.parts(), small_buckets(number == 1));
        subscriber.connect(std::move(channel), 0);
        EXPECT_EQ(subscriber.version(), -1);
        for (std::int64_t version = 1; version <= count; ++version) {
          ASSERT_EQ(subscriber.receive(), version);
          ASSERT_TRUE(weights.all_are(static_cast<double>(version)));
          if (number == 0) received.push_back(subscriber.weights_hash());
        }
        EXPECT_EQ(weights.c.data_ptr(), address);
      });
  EXPECT_THAT(errors, Each(""));
  EXPECT_EQ(sent, received);
  EXPECT_NE(sent.front(), sent.back());
}

TEST(WeightSync, PublishesEachVersionInPlace) { expect_syncs(30); }

TEST(SlowWeightSync, PublishesAThousandVersions) { expect_syncs(1000); }

TEST(WeightSync, HashIsOfTheWeightsWhateverWasSentBefore) {
  const Weights weights;
  Publisher publisher(comm::Group("trainers"), weights.parts(), small_buckets());
  weights.fill(1);
  const std::uint64_t one = publisher.weights_hash();
  weights.fill(2);
  EXPECT_NE(publisher.weights_hash(), one);
  weights.fill(1);
  EXPECT_EQ(publisher.weights_hash(), one);
  weights.b.select(0, 3).fill_(1.5);
  EXPECT_NE(publisher.weights_hash(), one);
}

TEST(WeightSync, SendsADamagedBucketOnceMore) {
  const auto errors = run_sides(
      kRollouts,
      [&](std::unique_ptr<Channel> channel) {
        const Weights weights;
        weights.fill(3);
        Publisher publisher(comm::Group("trainers"), weights.parts(), small_buckets());
        publisher.connect(std::move(channel), 0);
        EXPECT_EQ(publisher.publish(1).damaged, 1);
      },
      [&](std::unique_ptr<Channel> channel, std::int64_t number) {
        const Weights weights;
        Subscriber subscriber(weights.parts(), small_buckets());
        subscriber.connect(std::make_unique<DamagingChannel>(
                               std::move(channel),
                               [&](std::int64_t bucket) { return number == 1 && bucket == 2; }),
                           0);
        EXPECT_EQ(subscriber.receive(), 1);
        EXPECT_TRUE(weights.all_are(3));
        EXPECT_TRUE(subscriber.is_intact());
      });
  EXPECT_THAT(errors, Each(""));
}

TEST(WeightSync, DoesNotPublishWhatIsDamagedTwice) {
  for (const bool staged : {true, false}) {
    const auto errors = run_sides(
        kRollouts,
        [&](std::unique_ptr<Channel> channel) {
          const Weights weights;
          Publisher publisher(comm::Group("trainers"), weights.parts(), small_buckets());
          publisher.connect(std::move(channel), 0);
          weights.fill(1);
          publisher.publish(1);
          weights.fill(2);
          publisher.publish(2);
        },
        [&](std::unique_ptr<Channel> channel, std::int64_t number) {
          const Weights weights;
          Subscriber subscriber(weights.parts(), small_buckets(staged));
          const auto buckets =
              static_cast<std::int64_t>(Manifest(infos_of(weights.parts()), 4096).buckets().size());
          subscriber.connect(
              std::make_unique<DamagingChannel>(
                  std::move(channel),
                  [&](std::int64_t bucket) { return number == 0 && bucket > buckets; }),
              0);
          subscriber.receive();
          EXPECT_THROW(subscriber.receive(), CommError);
          EXPECT_EQ(subscriber.version(), 1);
          EXPECT_EQ(subscriber.is_intact(), staged);
          EXPECT_EQ(weights.all_are(1), staged);
          EXPECT_THROW(subscriber.receive(), CommError);
        });
    EXPECT_THAT(errors[0],
                AllOf(HasSubstr("version 2 is not published"), HasSubstr("damaged twice")));
  }
}

TEST(WeightSync, ComparesTensorsBeforeTheFirstByte) {
  const auto errors = run_sides(
      1,
      [&](std::unique_ptr<Channel> channel) {
        Publisher publisher(comm::Group("trainers"), Weights().parts(), small_buckets());
        publisher.connect(std::move(channel), 0);
      },
      [&](std::unique_ptr<Channel> channel, std::int64_t) {
        Weights weights;
        weights.b = at::zeros({8});
        Subscriber(weights.parts(), small_buckets()).connect(std::move(channel), 0);
      });
  EXPECT_THAT(errors,
              Each(AllOf(HasSubstr("do not have the same tensors"), HasSubstr("b Float ["))));
}

TEST(WeightSync, WarmUpSeesAWrongByte) {
  class WrongChannel final : public Channel {
   public:
    std::int64_t rank() const override { return 1; }
    std::int64_t size() const override { return 2; }
    // As a group that never moved anything.
    void broadcast(at::Tensor&, std::int64_t) override {}
    comm::Pending start_broadcast(at::Tensor&, std::int64_t) override { return {}; }
    void sum(at::Tensor&) override {}
    std::vector<std::string> gather(const std::string& text) override { return {text, text}; }
    void give_up() override {}
  };
  WrongChannel channel;
  EXPECT_THROW(warm_up(channel, 0, at::kCPU), CommError);
}

TEST(WeightSync, GoesOnInANewGenerationAfterARolloutIsGone) {
  testing::MeetingPlace first(kRollouts, 4), second(1, 30, 1);
  std::vector<std::string> errors(2);
  std::jthread lost([&] {
    // Joins, and never answers again.
    const auto channel = first.rollout(1);
    warm_up(*channel, 0, at::kCPU);
    channel->gather(fmt::format("{:016x}", Manifest(infos_of(Weights().parts()), 4096).hash()));
  });
  std::jthread survivor([&] {
    const Weights weights;
    Subscriber subscriber(weights.parts(), small_buckets());
    subscriber.connect(first.rollout(0), 0);
    try {
      subscriber.receive();
    } catch (const CommError& error) {
      errors[1] = error.what();
    }
    subscriber.connect(second.rollout(0), 1);
    EXPECT_EQ(subscriber.receive(), 2);
    EXPECT_TRUE(weights.all_are(2));
    EXPECT_TRUE(subscriber.is_intact());
  });
  const Weights weights;
  Publisher publisher(comm::Group("trainers"), weights.parts(), small_buckets());
  publisher.connect(first.sender(), 0);
  try {
    publisher.publish(1);
  } catch (const CommError& error) {
    errors[0] = error.what();
  }
  EXPECT_NE(errors[0], "");
  EXPECT_THROW(publisher.publish(1), CommError);
  publisher.connect(second.sender(), 1);
  weights.fill(2);
  publisher.publish(2);
  survivor.join();
  EXPECT_NE(errors[1], "");
}

}  // namespace
}  // namespace heddle::sync
