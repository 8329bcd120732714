// Weights that travel from device to device: on the simulated NPU in every build, and between two
// GPUs.
#include <ATen/TensorOperators.h>
#include <ATen/ops/randint.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "meet.h"
#include "sync/checksum.h"
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
                              std::int64_t rollouts) {
  std::uint64_t sent = 0, received = 0;
  const auto errors = run_sides(
      rollouts,
      [&](std::unique_ptr<Channel> channel) {
        const c10::Device device = place(0);
        device::start(device);
        const Weights weights(device);
        Publisher publisher(comm::Group("trainers"), weights.parts(), {kBucket, false, device});
        publisher.connect(std::move(channel), 0);
        for (std::int64_t version = 1; version <= 5; ++version) {
          weights.fill(static_cast<double>(version));
          const SyncReport report = publisher.publish(version);
          EXPECT_EQ(report.damaged, 0);
          sent = report.weights_hash;
        }
        EXPECT_EQ(publisher.weights_hash(), sent);
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
        for (std::int64_t version = 1; version <= 5; ++version) {
          ASSERT_EQ(subscriber.receive(), version);
          ASSERT_TRUE(weights.all_are(static_cast<double>(version)));
        }
        EXPECT_EQ(address_of_c(), address);
        if (number == 0) received = subscriber.weights_hash();
      });
  EXPECT_THAT(errors, Each(""));
  EXPECT_NE(sent, 0u);
  EXPECT_EQ(sent, received);
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

TEST(GpuWeightSync, EndsInTimeWithoutItsRollout) { expect_an_error_in_time(gpu); }

}  // namespace
}  // namespace heddle::sync
