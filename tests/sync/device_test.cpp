// Weights that travel from device to device: on the simulated NPU in every build, and between two
// GPUs.
#include <ATen/TensorOperators.h>
#include <ATen/ops/randint.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "damaging_channel.h"
#include "meet.h"
#include "sync/checksum.h"
#include "sync/manifest.h"
#include "sync/weight_sync.h"
#include "testing/device.h"
#include "weights.h"

namespace heddle::sync {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using testing::run_sides;
using testing::Weights;

constexpr std::int64_t kBucket = 4096;

void expect_checksum_of_host(c10::Device device) {
  for (const std::int64_t count : {1, 2, 29, 4096, 65537}) {
    const at::Tensor words = at::randint(std::int64_t{1} << 62, {count}, at::kLong);
    const at::Tensor expected = checksum(words, 7);
    EXPECT_TRUE(checksum(words.to(device), 7).cpu().equal(expected)) << count;
    at::Tensor damaged = words.clone();
    damaged.select(0, count - 1).bitwise_xor_(4);
    EXPECT_FALSE(checksum(damaged.to(device), 7).cpu().equal(expected)) << count;
  }
}

/// `place(member)`: the member's device.
void expect_versions_in_place(const std::function<c10::Device(std::int64_t)>& place,
                              std::int64_t rollouts, std::int64_t versions = 5) {
  std::vector<std::uint64_t> sent, received;
  const auto errors = run_sides(
      rollouts,
      [&](std::unique_ptr<Channel> channel) {
        const c10::Device device = place(0);
        device::start(device);
        const Weights weights(device);
        Publisher publisher(comm::Group("trainers"), weights.parts(), {kBucket, false, device});
        publisher.connect(std::move(channel), 0);
        for (std::int64_t version = 1; version <= versions; ++version) {
          weights.fill(static_cast<double>(version));
          const SyncReport report = publisher.publish(version);
          ASSERT_EQ(report.damaged, 0);
          sent.push_back(report.weights_hash);
        }
        EXPECT_EQ(publisher.weights_hash(), sent.back());
      },
      [&](std::unique_ptr<Channel> channel, std::int64_t number) {
        const c10::Device device = place(number + 1);
        device::start(device);
        const Weights weights(device);
        // The simulated NPU lets the host see no address.
        const auto address_of_c = [&]() -> const void* {
          return device.is_privateuseone() ? nullptr : weights.c.data_ptr();
        };
        const void* const address = address_of_c();
        Subscriber subscriber(weights.parts(), {kBucket, number == 1, device});
        subscriber.connect(std::move(channel), 0);
        for (std::int64_t version = 1; version <= versions; ++version) {
          ASSERT_EQ(subscriber.receive(), version);
          ASSERT_TRUE(weights.all_are(static_cast<double>(version)));
          if (number == 0) received.push_back(subscriber.weights_hash());
        }
        EXPECT_EQ(address_of_c(), address);
      });
  EXPECT_THAT(errors, Each(""));
  EXPECT_EQ(sent, received);
  EXPECT_NE(sent.front(), sent.back());
}

/// A bit that flips in a bucket's memory on the device is seen there, and the bucket sent again.
void expect_damage_is_seen(const std::function<c10::Device(std::int64_t)>& place) {
  const auto errors = run_sides(
      1,
      [&](std::unique_ptr<Channel> channel) {
        const c10::Device device = place(0);
        device::start(device);
        const Weights weights(device);
        weights.fill(3);
        Publisher publisher(comm::Group("trainers"), weights.parts(), {kBucket, false, device});
        publisher.connect(std::move(channel), 0);
        EXPECT_EQ(publisher.publish(1).damaged, 1);
        weights.fill(4);
        publisher.publish(2);
      },
      [&](std::unique_ptr<Channel> channel, std::int64_t) {
        const c10::Device device = place(1);
        device::start(device);
        const Weights weights(device);
        Subscriber subscriber(weights.parts(), {kBucket, false, device});
        const auto buckets = static_cast<std::int64_t>(
            Manifest(infos_of(weights.parts()), kBucket).buckets().size());
        // Once in the first version; in the second all.
        subscriber.connect(
            std::make_unique<testing::DamagingChannel>(
                std::move(channel),
                [&](std::int64_t bucket) { return bucket == 2 || bucket > buckets; }),
            0);
        EXPECT_EQ(subscriber.receive(), 1);
        EXPECT_TRUE(weights.all_are(3));
        EXPECT_THROW(subscriber.receive(), CommError);
        EXPECT_EQ(subscriber.version(), 1);
      });
  EXPECT_THAT(errors[0], HasSubstr("damaged twice"));
  EXPECT_EQ(errors[1], "");
}

void expect_an_error_in_time(const std::function<c10::Device(std::int64_t)>& place) {
  const auto errors = run_sides(
      1,
      [&](std::unique_ptr<Channel> channel) {
        const c10::Device device = place(0);
        device::start(device);
        const Weights weights(device);
        Publisher publisher(comm::Group("trainers"), weights.parts(), {kBucket, false, device});
        publisher.connect(std::move(channel), 0);
        publisher.publish(1);
      },
      [&](std::unique_ptr<Channel> channel, std::int64_t) {
        const c10::Device device = place(1);
        device::start(device);
        const Weights weights(device);
        Subscriber subscriber(weights.parts(), {kBucket, false, device});
        subscriber.connect(std::move(channel), 0);
        throw Error("this rollout ends");
      },
      4);
  EXPECT_THAT(errors[0], HasSubstr("rank"));
  EXPECT_EQ(errors[1], "this rollout ends");
}

TEST(NpuWeightSync, ChecksumIsThatOfTheHost) {
  expect_checksum_of_host(heddle::testing::simulated_npu());
}

TEST(NpuWeightSync, PublishesEachVersionInPlace) {
  const c10::Device npu = heddle::testing::simulated_npu();
  expect_versions_in_place([&](std::int64_t) { return npu; }, 2);
}

TEST(SlowNpuWeightSync, PublishesAThousandVersions) {
  const c10::Device npu = heddle::testing::simulated_npu();
  expect_versions_in_place([&](std::int64_t) { return npu; }, 2, 1000);
}

TEST(NpuWeightSync, SeesDamage) {
  const c10::Device npu = heddle::testing::simulated_npu();
  expect_damage_is_seen([&](std::int64_t) { return npu; });
}

TEST(NpuWeightSync, EndsInTimeWithoutItsRollout) {
  const c10::Device npu = heddle::testing::simulated_npu();
  expect_an_error_in_time([&](std::int64_t) { return npu; });
}

c10::Device gpu(std::int64_t number) { return device::parse("cuda:" + std::to_string(number)); }

TEST(GpuWeightSync, ChecksumIsThatOfTheHost) {
  device::start(gpu(0));
  expect_checksum_of_host(gpu(0));
}

TEST(GpuWeightSync, PublishesEachVersionInPlace) { expect_versions_in_place(gpu, 1); }

TEST(SlowGpuWeightSync, PublishesAThousandVersions) { expect_versions_in_place(gpu, 1, 1000); }

TEST(GpuWeightSync, SeesDamage) { expect_damage_is_seen(gpu); }

TEST(GpuWeightSync, EndsInTimeWithoutItsRollout) { expect_an_error_in_time(gpu); }

}  // namespace
}  // namespace heddle::sync
