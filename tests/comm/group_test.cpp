#include "comm/group.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "base/errors.h"
#include "comm/mesh.h"
#include "comm/ranks.h"

namespace heddle::comm {
namespace {

using heddle::testing::run_ranks;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::HasSubstr;

Group all(const std::shared_ptr<World>& world) {
  return Mesh({1, 1, 1, world->size(), 1}, world).world_group();
}

TEST(Group, OfOneRankIsTheIdentity) {
  const Group group("alone");
  at::Tensor x = at::arange(3, at::kDouble), y = at::empty({3}, at::kDouble);
  group.all_reduce_sum(x);
  group.all_gather(y, x);
  EXPECT_EQ(y.sum().item<double>(), 3);
  EXPECT_EQ(group.all_reduce_sum(2.5), 2.5);
  EXPECT_FALSE(group.any(false));
  EXPECT_THAT(group.all_gather_objects("x"), ::testing::ElementsAre("x"));
}

TEST(Group, CollectivesGiveWhatTheyPromise) {
  const auto errors = run_ranks(3, [](const std::shared_ptr<World>& world) {
    const Group group = all(world);
    const auto rank = static_cast<double>(group.rank());
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      at::Tensor sum = at::full({5}, rank + 1, dtype);
      group.all_reduce_sum(sum);
      EXPECT_EQ(sum[4].item<double>(), 6);
      at::Tensor gathered = at::empty({6}, dtype);
      group.all_gather(gathered, at::full({2}, rank, dtype));
      for (int i = 0; i < 6; ++i) EXPECT_EQ(gathered[i].item<double>(), i / 2);
      at::Tensor part = at::empty({2}, dtype);
      group.reduce_scatter_sum(part, at::arange(6, dtype));
      EXPECT_EQ(part[1].item<double>(), 3 * (2 * rank + 1));
    }
    EXPECT_EQ(group.all_reduce_sum(rank), 3);
    EXPECT_TRUE(group.any(group.rank() == 2));
    EXPECT_FALSE(group.any(false));
    at::Tensor from_one = at::full({2}, rank, at::kLong);
    group.broadcast(from_one, 1);
    EXPECT_EQ(from_one[0].item<std::int64_t>(), 1);
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(Group, SeveralTensorsTravelTogether) {
  const auto errors = run_ranks(3, [](const std::shared_ptr<World>& world) {
    const Group group = all(world);
    const auto rank = static_cast<double>(group.rank());
    for (const auto dtype : {at::kDouble, at::kBFloat16}) {
      std::vector<at::Tensor> own, gathered, whole, parts;
      for (const std::int64_t size : {1, 4, 2}) {
        own.push_back(at::full({size}, rank + static_cast<double>(size), dtype));
        gathered.push_back(at::empty({3 * size}, dtype));
        whole.push_back(at::arange(3 * size, dtype));
        parts.push_back(at::empty({size}, dtype));
      }
      group.all_gather_async(gathered, own).wait();
      group.reduce_scatter_sum_async(parts, whole).wait();
      for (std::size_t i = 0; i < own.size(); ++i) {
        const std::int64_t size = own[i].size(0);
        for (std::int64_t j = 0; j < 3 * size; ++j)
          EXPECT_EQ(gathered[i][j].item<double>(), static_cast<double>(j / size + size));
        for (std::int64_t j = 0; j < size; ++j)
          EXPECT_EQ(parts[i][j].item<double>(), 3 * (rank * static_cast<double>(size) + j));
      }
    }
    group.all_gather_async(std::vector<at::Tensor>{}, {}).wait();
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(Group, AllToAllTakesUnevenAndEmptyParts) {
  // Rank r sends r rows to rank 0, none to rank 1, and one to rank 2.
  const auto errors = run_ranks(3, [](const std::shared_ptr<World>& world) {
    const Group group = all(world);
    const std::int64_t r = group.rank();
    const std::vector<std::int64_t> to = {r, 0, 1};
    const std::vector<std::int64_t> from = r == 0   ? std::vector<std::int64_t>{0, 1, 2}
                                           : r == 1 ? std::vector<std::int64_t>{0, 0, 0}
                                                    : std::vector<std::int64_t>{1, 1, 1};
    const at::Tensor input = at::full({r + 1, 4}, static_cast<double>(r), at::kDouble);
    at::Tensor output = at::empty({3 * (r != 1), 4}, at::kDouble);
    group.all_to_all(output, from, input, to);
    if (r == 0) {
      EXPECT_EQ(output.sum().item<double>(), 4 * (1 + 2 + 2));
    }
    if (r == 2) {
      EXPECT_EQ(output.sum().item<double>(), 4 * (0 + 1 + 2));
    }
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(Group, ObjectsMayBeEmptyAndOfAnyLength) {
  const auto errors = run_ranks(3, [](const std::shared_ptr<World>& world) {
    const std::string mine(static_cast<std::size_t>(world->rank() * 1000), 'x');
    const auto objects = all(world).all_gather_objects(mine);
    for (std::size_t r = 0; r < 3; ++r) EXPECT_EQ(objects[r].size(), r * 1000);
    EXPECT_THAT(all(world).all_gather_objects(""), Each(""));
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(Group, PointToPoint) {
  const auto errors = run_ranks(2, [](const std::shared_ptr<World>& world) {
    const Group group = all(world);
    at::Tensor x = at::zeros({3}, at::kDouble);
    if (group.rank() == 0) {
      group.send(at::full({3}, 7.0, at::kDouble), 1);
    } else {
      group.receive(x, 0);
      EXPECT_EQ(x[2].item<double>(), 7);
    }
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(Mesh, GroupsAlongItsDimensions) {
  const auto errors = run_ranks(4, [](const std::shared_ptr<World>& world) {
    const Mesh mesh({1, 1, 2, 2, 1}, world);
    EXPECT_EQ(mesh.coordinate(Dim::kFsdp), world->rank() % 2);
    EXPECT_EQ(mesh.coordinate(Dim::kDp), world->rank() / 2);
    const auto rank = static_cast<double>(world->rank());
    EXPECT_EQ(mesh.group({Dim::kFsdp}).all_reduce_sum(rank), world->rank() < 2 ? 1 : 5);
    EXPECT_EQ(mesh.group({Dim::kDp}).all_reduce_sum(rank), world->rank() % 2 == 0 ? 2 : 4);
    EXPECT_EQ(mesh.loss_group().all_reduce_sum(rank), 6);
    EXPECT_EQ(mesh.group({Dim::kTp}).size(), 1);
  });
  EXPECT_THAT(errors, Each(""));
}

TEST(Group, AFailureReachesThoseWhoWait) {
  const auto errors = run_ranks(
      3,
      [](const std::shared_ptr<World>& world) {
        const Group group = all(world);
        group.barrier();
        if (world->rank() == 1) throw DataError("row 7 is broken");
        group.barrier();
      },
      3600);
  EXPECT_EQ(errors[1], "row 7 is broken");
  for (const int r : {0, 2}) {
    EXPECT_THAT(errors[r],
                HasSubstr("all_reduce of group tp x cp x fsdp x dp x pp (ranks 0, 1, 2)"));
    EXPECT_THAT(errors[r], HasSubstr("rank 1 failed: row 7 is broken"));
  }
}

TEST(Group, ALateRankIsNamedAtTheDeadline) {
  std::promise<void> has_given_up;
  const auto errors = run_ranks(
      2,
      [&](const std::shared_ptr<World>& world) {
        const Group group = all(world);
        group.barrier();
        if (world->rank() == 1) {
          EXPECT_EQ(has_given_up.get_future().wait_for(std::chrono::seconds(60)),
                    std::future_status::ready);
          return;
        }
        try {
          group.barrier();
        } catch (const CommError&) {
          has_given_up.set_value();
          throw;
        }
      },
      6);
  EXPECT_THAT(errors[0], ContainsRegex("on rank 0 gave up after [0-9]+\\.[0-9] s"));
  EXPECT_THAT(errors[0], HasSubstr("rank 1 is computing"));
}

}  // namespace
}  // namespace heddle::comm
