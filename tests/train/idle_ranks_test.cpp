#include "train/idle_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace heddle::train {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::StartsWith;

/// tp, cp, fsdp, dp, pp
comm::Mesh mesh(comm::Mesh::Sizes sizes) {
  std::int64_t world = 1;
  for (const std::int64_t size : sizes) world *= size;
  return {sizes, 0, world};
}

TEST(IdleRanks, DataRanksWithoutARowAreCounted) {
  EXPECT_THAT(idle_ranks(mesh({1, 1, 2, 2, 1}), {.global_batch_size = 2}),
              ElementsAre("train.global_batch_size 2 over dp x fsdp 4: 2 ranks have no row in a "
                          "step"));
  EXPECT_THAT(idle_ranks(mesh({3, 1, 2, 1, 1}), {.global_batch_size = 8, .of_data = 1}),
              ElementsAre("the data's 1 row an epoch over dp x fsdp 2: 3 ranks have no row in a "
                          "step"));
  EXPECT_THAT(idle_ranks(mesh({1, 1, 2, 2, 1}), {.global_batch_size = 4, .of_data = 300}),
              IsEmpty());
}

TEST(IdleRanks, StagesWithFewerMicroBatchesAreNamed) {
  EXPECT_THAT(idle_ranks(mesh({1, 1, 1, 1, 2}), {.global_batch_size = 8, .micro_batches = 0.3}),
              ElementsAre(StartsWith("1 micro-batch a step over pp 2: ")));
  EXPECT_THAT(idle_ranks(mesh({1, 1, 1, 1, 2}), {.global_batch_size = 8, .micro_batches = 2}),
              IsEmpty());
  EXPECT_THAT(idle_ranks(mesh({2, 2, 1, 1, 1}), {.global_batch_size = 1, .micro_batches = 1}),
              IsEmpty());
}

TEST(IdleRanks, CompletionsAreCountedByTheKeysThatGiveThem) {
  config::RunConfig config;
  EXPECT_EQ(rows_of_step(config).global_batch_size, config.train.global_batch_size);
  config.train.objective = config::Objective::kPolicy;
  config.rl.groups_per_step = 2;
  config.rl.samples_per_group = 3;
  StepRows rows = rows_of_step(config);
  EXPECT_EQ(rows.global_batch_size, 6);
  EXPECT_THAT(idle_ranks(mesh({1, 1, 1, 8, 1}), rows),
              ElementsAre("rl.groups_per_step x rl.samples_per_group 6 over dp x fsdp 8: 2 ranks "
                          "have no row in a step"));
  rows.micro_batches = 1;
  EXPECT_THAT(idle_ranks(mesh({1, 1, 1, 1, 2}), rows),
              ElementsAre(::testing::HasSubstr("a larger rl.groups_per_step x "
                                               "rl.samples_per_group or smaller")));
}

}  // namespace
}  // namespace heddle::train
