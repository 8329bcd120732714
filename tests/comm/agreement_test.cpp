#include "comm/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "comm/ranks.h"

namespace heddle::comm {
namespace {

using heddle::testing::run_ranks;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

TEST(Agreement, NamesKeyValuesAndRanks) {
  const std::vector<Fact> usual = {{"optim.lr", "0.001"}, {"data.train", "f00", "a.jsonl"}};
  const std::vector<Fact> other = {{"optim.lr", "0.05"}, {"data.train", "f00", "b.jsonl"}};
  EXPECT_EQ(disagreement({usual, usual}), "");
  EXPECT_EQ(disagreement({usual, other, usual, other, other}),
            "optim.lr is 0.001 on ranks 0, 2 and 0.05 on ranks 1, 3 to 4");
  EXPECT_EQ(disagreement({usual, {{"optim.lr", "0.001"}, {"data.train", "ba4", "b.jsonl"}}}),
            "data.train is a.jsonl on rank 0 and b.jsonl on rank 1");
  EXPECT_EQ(disagreement({usual, {usual[0]}}),
            "data.train is a.jsonl on rank 0 and not there on rank 1");
  EXPECT_EQ(disagreement({{{"a", ""}}, {{"a", "1"}}}), "a is '' on rank 0 and 1 on rank 1");
}

TEST(Agreement, ManyDifferencesStayReadable) {
  std::vector<std::vector<Fact>> ranks(5);
  for (int r = 0; r < 5; ++r) {
    for (int i = 0; i < 20; ++i) {
      ranks[static_cast<std::size_t>(r)].push_back(
          {"key" + std::to_string(i), std::string(1000, static_cast<char>('a' + r))});
    }
  }
  const std::string text = disagreement(ranks);
  EXPECT_THAT(text, AllOf(HasSubstr("key3 is aaa"), HasSubstr("something else on the others"),
                          HasSubstr("; and 16 more")));
  EXPECT_LT(text.size(), 2500u);
}

TEST(Agreement, AllRanksGetTheSameError) {
  const auto errors = run_ranks(3, [](const std::shared_ptr<World>& world) {
    require_agreement(*world, "configuration", {{"seed", "1"}, {"a:b", "c: 3:d", "shown"}});
    try {
      require_agreement(*world, "configuration", {{"lr", world->rank() == 1 ? "0.05" : "0.001"}});
    } catch (const ConfigError&) {
      throw;
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string("no mistake of the user: ") + error.what());
    }
  });
  EXPECT_THAT(errors, Each("the configuration is not the same on all ranks: lr is 0.001 on ranks "
                           "0, 2 and 0.05 on rank 1"));
}

TEST(Agreement, EndsWhenARankFails) {
  const auto errors = run_ranks(
      3,
      [](const std::shared_ptr<World>& world) {
        if (world->rank() == 1) throw std::runtime_error("the disk is full");
        require_agreement(*world, "model", {});
      },
      3600);
  EXPECT_EQ(errors[0], "rank 1 failed: the disk is full");
  EXPECT_EQ(errors[2], "rank 1 failed: the disk is full");
}

}  // namespace
}  // namespace heddle::comm
