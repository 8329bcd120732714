#include "comm/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "base/errors.h"

namespace heddle::comm {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

TEST(Mesh, RanksAlongSeveralDimensions) {
  const Mesh mesh({2, 2, 1, 2, 1}, 5, 8);  // tp 1, cp 0, dp 1
  EXPECT_EQ(mesh.coordinate(Dim::kTp), 1);
  EXPECT_EQ(mesh.coordinate(Dim::kCp), 0);
  EXPECT_EQ(mesh.coordinate(Dim::kDp), 1);
  EXPECT_THAT(mesh.ranks_along({Dim::kTp}), ElementsAre(4, 5));
  EXPECT_THAT(mesh.ranks_along({Dim::kCp, Dim::kDp}), ElementsAre(1, 3, 5, 7));
}

TEST(Mesh, ProductMustBeTheWorld) {
  EXPECT_THAT(
      [] {
        Mesh({2, 1, 1, 2, 1}, 0, 3);
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("tp 2 x cp 1 x fsdp 1 x dp 2 x pp 1 = 4 ranks"),
                                       HasSubstr("3 ranks"), HasSubstr("--nproc 4"),
                                       Not(HasSubstr("auto")))));
  EXPECT_THAT(
      [] {
        Mesh({2, 1, 1, 3, 1}, 0, 4);
      },
      ThrowsMessage<ConfigError>(HasSubstr("or parallel.dp=auto (here 2)")));
}

TEST(Mesh, ExpertsSeeTheSameRanksAsEpEfsdpEdp) {
  const Mesh mesh({2, 1, 2, 2, 2}, 13, 16, 2);  // of the second stage, rank 5 of 8
  EXPECT_EQ(mesh.size(Dim::kEp), 2);
  EXPECT_EQ(mesh.size(Dim::kEfsdp), 2);
  EXPECT_EQ(mesh.size(Dim::kEdp), 2);
  EXPECT_THAT(mesh.ranks_along({Dim::kEp}), ElementsAre(12, 13));
  EXPECT_THAT(mesh.ranks_along({Dim::kEfsdp}), ElementsAre(13, 15));
  EXPECT_THAT(mesh.ranks_along({Dim::kEdp}), ElementsAre(9, 13));
  EXPECT_THAT(mesh.ranks_along({Dim::kEfsdp, Dim::kEdp}), ElementsAre(9, 11, 13, 15));
  EXPECT_THAT(mesh.describe(), HasSubstr("= 16 ranks, experts ep 2 x efsdp 2 x edp 2"));
}

TEST(Mesh, ExpertShardingIsWhatEpLeavesOfTheShardingRanks) {
  struct Case {
    Mesh::Sizes sizes;
    std::int64_t ep, efsdp, edp;
  };
  for (const Case& c : {Case{{1, 1, 2, 2, 1}, 2, 1, 2},     // fsdp goes to ep
                        Case{{1, 1, 2, 2, 1}, 4, 1, 1},     // and dp too
                        Case{{1, 1, 1, 4, 1}, 2, 1, 2},     // nothing is sharded
                        Case{{1, 1, 3, 2, 1}, 2, 3, 1},     // ep lies across fsdp
                        Case{{1, 1, 4, 3, 1}, 6, 2, 1},     // and shares a factor with it
                        Case{{2, 2, 2, 1, 1}, 1, 8, 1}}) {  // without ep
    std::int64_t world = 1;
    for (const std::int64_t size : c.sizes) world *= size;
    std::set<std::vector<std::int64_t>> places;
    for (std::int64_t rank = 0; rank < world; ++rank) {
      const Mesh mesh(c.sizes, rank, world, c.ep);
      EXPECT_EQ(mesh.size(Dim::kEfsdp), c.efsdp) << mesh.describe();
      EXPECT_EQ(mesh.size(Dim::kEdp), c.edp) << mesh.describe();
      places.insert(
          {mesh.coordinate(Dim::kEp), mesh.coordinate(Dim::kEfsdp), mesh.coordinate(Dim::kEdp)});
    }
    EXPECT_EQ(places.size(), static_cast<std::size_t>(world));
  }
}

TEST(Mesh, EpMustDivideTheRanksOfAStage) {
  EXPECT_THAT(
      [] {
        Mesh({1, 1, 2, 4, 2}, 0, 16, 6);
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("parallel.ep is 6"),
                                       HasSubstr("tp x cp x fsdp x dp = 8"),
                                       HasSubstr("the nearest degree that does is 4"))));
}

}  // namespace
}  // namespace heddle::comm
