#include "parallel/sharding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "comm/ranks.h"

namespace heddle::parallel {
namespace {

using comm::Dim;

struct Layout {
  comm::Mesh::Sizes sizes;
  std::int64_t ep;
};

/// The part of a whole tensor that a rank along ep holds.
at::Tensor part_of(const nn::Parameter& parameter, const at::Tensor& whole,
                   const comm::Mesh& mesh) {
  if (!parameter.is_expert()) return whole;
  const std::int64_t rows = whole.size(0) / mesh.size(Dim::kEp);
  return whole.narrow(0, mesh.coordinate(Dim::kEp) * rows, rows);
}

/// Loads, gathers and reduces dense parameters (a small one, and two that have buffers of their
/// own, with as many rows on each rank and with fewer on the last), one of experts and a row table
/// on every rank. Rank r adds r + 1 to every gradient; those of the dense ones are summed along tp
/// nowhere.
void check(const Layout& layout) {
  std::int64_t world_size = 1;
  for (const std::int64_t size : layout.sizes) world_size *= size;
  const auto errors =
      testing::run_ranks(world_size, [&](const std::shared_ptr<comm::World>& world) {
        const comm::Mesh mesh(layout.sizes, world, layout.ep);
        nn::Parameter dense("dense", {5, 3}), expert("expert", {12, 2}, {{Dim::kEp, 0, {}}}),
            table("table", {7, 2}), even("even", {264, 256}), uneven("uneven", {263, 256});
        table.set_row_table();
        const auto all = {&dense, &expert, &table, &even, &uneven};
        Sharding sharding(mesh);
        for (nn::Parameter* parameter : all) parameter->place(mesh);
        std::vector<Sharding::Member> members;
        for (nn::Parameter* parameter : all) members.push_back({parameter, at::kDouble});
        sharding.add(0, members, at::kCPU);
        for (nn::Parameter* parameter : all) {
          parameter->write_owned(
              at::arange(parameter->numel(), at::kDouble).view(parameter->global_shape()));
        }
        sharding.publish();
        sharding.acquire(0);
        std::int64_t owned_rows = 0;
        for (nn::Parameter* parameter : all) {
          const at::Tensor whole =
              at::arange(parameter->numel(), at::kDouble).view(parameter->global_shape());
          EXPECT_TRUE(at::equal(parameter->data(), part_of(*parameter, whole, mesh)))
              << parameter->name() << " on " << mesh.describe();
          parameter->add_gradient(at::full(parameter->local_shape(),
                                           static_cast<double>(world->rank() + 1), at::kDouble));
          if (!parameter->is_copy()) owned_rows += parameter->owned().size(0);
        }
        sharding.release(0);
        for (const nn::Parameter* parameter : {&dense, &even, &uneven})
          EXPECT_EQ(parameter->has_memory(), mesh.size(Dim::kFsdp) * mesh.size(Dim::kCp) == 1);
        EXPECT_EQ(expert.has_memory(), mesh.size(Dim::kEfsdp) == 1);
        EXPECT_EQ(table.has_memory(),
                  mesh.size(Dim::kTp) * mesh.size(Dim::kFsdp) * mesh.size(Dim::kCp) == 1);
        sharding.reduce(0);
        sharding.finish_reduction();
        // Every row has one owner, so that norms count it once and checkpoints hold it once.
        EXPECT_EQ(mesh.world_group().all_reduce_sum(static_cast<double>(owned_rows)),
                  5 + 12 + 7 + 264 + 263);
        const auto dense_ranks = mesh.ranks_along({Dim::kCp, Dim::kFsdp, Dim::kDp});
        for (const auto& [parameter, ranks] :
             {std::pair{&dense, dense_ranks}, std::pair{&even, dense_ranks},
              std::pair{&uneven, dense_ranks},
              std::pair{&expert, mesh.ranks_along({Dim::kEfsdp, Dim::kEdp})},
              std::pair{&table, mesh.ranks_along({Dim::kTp, Dim::kCp, Dim::kFsdp, Dim::kDp})}}) {
          double sum = 0;
          for (const std::int64_t rank : ranks) sum += static_cast<double>(rank + 1);
          EXPECT_TRUE(at::equal(parameter->gradient(),
                                at::full(parameter->owned().sizes(), sum, at::kDouble)))
              << parameter->name() << " on " << mesh.describe();
        }
      });
  EXPECT_THAT(errors, ::testing::Each(""));
}

TEST(Sharding, EachKindIsDividedOverItsOwnRanks) {
  for (const Layout& layout :
       {Layout{{1, 1, 1, 2, 1}, 2}, Layout{{1, 1, 2, 2, 1}, 2}, Layout{{1, 1, 3, 2, 1}, 2},
        Layout{{2, 1, 1, 2, 1}, 1}, Layout{{2, 1, 2, 2, 1}, 1}}) {
    check(layout);
  }
}

/// Runs units of one parameter through `micro_batches`; gradients of unit u and micro-batch m on
/// rank r are (r + 1) (m + 1) + u. Tells how many units' whole gradients the sharding holds at
/// most.
std::int64_t most_held(const Layout& layout, Summing summing, std::int64_t micro_batches) {
  constexpr std::int64_t kUnits = 8, kRows = 264;
  std::int64_t most = 0;
  const auto errors = testing::run_ranks(4, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh(layout.sizes, world, layout.ep);
    Sharding sharding(mesh, summing);
    std::vector<std::unique_ptr<nn::Parameter>> parameters;
    for (std::int64_t u = 0; u < kUnits; ++u) {
      parameters.push_back(std::make_unique<nn::Parameter>(std::to_string(u),
                                                           std::vector<std::int64_t>{kRows, 256}));
      parameters.back()->place(mesh);
      sharding.add(static_cast<std::size_t>(u), {{parameters.back().get(), at::kDouble}}, at::kCPU);
    }
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> given;
    for (std::int64_t m = 0; m < micro_batches; ++m) {
      for (std::int64_t u = kUnits; u-- > 0;) {
        const double value = static_cast<double>((world->rank() + 1) * (m + 1) + u);
        {
          at::Tensor gradient = at::full({kRows, 256}, value, at::kDouble);
          given.emplace_back(gradient.storage().getWeakStorageImpl());
          parameters[static_cast<std::size_t>(u)]->add_gradient(gradient);
        }
        sharding.reduce(static_cast<std::size_t>(u), m + 1 == micro_batches);
        const auto held = std::count_if(given.begin(), given.end(),
                                        [](const auto& storage) { return !storage.expired(); });
        if (world->rank() == 0) most = std::max<std::int64_t>(most, held);
      }
    }
    sharding.finish_reduction();
    for (std::int64_t u = 0; u < kUnits; ++u) {
      double sum = 0;
      for (std::int64_t m = 0; m < micro_batches; ++m) {
        for (std::int64_t rank = 0; rank < 4; ++rank)
          sum += static_cast<double>((rank + 1) * (m + 1) + u);
      }
      const nn::Parameter& parameter = *parameters[static_cast<std::size_t>(u)];
      EXPECT_TRUE(
          at::equal(parameter.gradient(), at::full(parameter.owned().sizes(), sum, at::kDouble)));
    }
  });
  EXPECT_THAT(errors, ::testing::Each(""));
  return most;
}

TEST(Sharding, WholeGradientsOfAFewUnitsAreHeldAtOnce) {
  constexpr auto kFew = static_cast<std::int64_t>(Sharding::kUnitsUnderWay);
  for (const Layout& layout :
       {Layout{{1, 1, 4, 1, 1}, 1}, Layout{{1, 1, 1, 4, 1}, 1}, Layout{{1, 1, 2, 2, 1}, 1}}) {
    EXPECT_LE(most_held(layout, Summing::kStep, 1), kFew);
    EXPECT_LE(most_held(layout, Summing::kMicroBatch, 3), kFew);
    EXPECT_EQ(most_held(layout, Summing::kStep, 3), 8);
  }
}

TEST(Sharding, AcquiredUnitsStayUntilTheirHolderEnds) {
  const auto errors = testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh({1, 1, 2, 1, 1}, world, 1);
    Sharding sharding(mesh);
    nn::Parameter held("held", {4, 2}), other("other", {4, 2});
    for (nn::Parameter* parameter : {&held, &other}) {
      parameter->place(mesh);
      sharding.add(parameter == &held ? 0 : 1, {{parameter, at::kDouble}}, at::kCPU);
      parameter->write_owned(at::arange(8, at::kDouble).view({4, 2}));
    }
    sharding.publish(/*with_frozen=*/true);
    {
      const Acquired all(&sharding, {0, 1});
      // A pass goes through its units as ever.
      sharding.acquire(0);
      sharding.release(0);
      EXPECT_TRUE(sharding.is_acquired(0));
      EXPECT_EQ(held.data().sum().item<double>(), 28);
      const Acquired again(&sharding, {0});
    }
    EXPECT_FALSE(sharding.is_acquired(0));
    EXPECT_FALSE(held.has_memory());
    sharding.acquire(1);
    sharding.release(1);
    EXPECT_FALSE(other.has_memory());
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

}  // namespace
}  // namespace heddle::parallel
