#include "data/packing/packing.h"

#include <algorithm>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/rng.h"

namespace heddle::data {
namespace {

using ::testing::ElementsAre;

std::vector<std::int64_t> iota(std::size_t count) {
  std::vector<std::int64_t> list(count);
  std::iota(list.begin(), list.end(), 0);
  return list;
}

TEST(Packing, FillsTheFullestRowThatHasRoom) {
  const std::vector<std::int64_t> lengths = {3, 7, 5, 4, 1};
  const Groups groups = pack_best_fit(iota(5), lengths, 10);
  ASSERT_EQ(groups.size(), 2);
  EXPECT_THAT(std::vector(groups[0].begin(), groups[0].end()), ElementsAre(0, 1));
  EXPECT_THAT(std::vector(groups[1].begin(), groups[1].end()), ElementsAre(2, 3, 4));
}

TEST(Packing, KeepsEveryItemOnceAndWithinTheCapacity) {
  for (const int count : {0, 1, 29, 1000}) {
    for (const std::int64_t capacity : {64, 65, 129}) {
      const CounterRng rng(count + capacity, "lengths");
      std::vector<std::int64_t> lengths(count);
      std::int64_t total = 0;
      for (int i = 0; i < count; ++i) {
        total += lengths[i] = 1 + static_cast<std::int64_t>(rng.below(i, 64));
      }
      const Groups groups = pack_in_windows(iota(count), lengths, capacity, 500);
      std::vector<std::int64_t> seen(groups.items);
      std::sort(seen.begin(), seen.end());
      EXPECT_EQ(seen, iota(count));
      for (std::int64_t g = 0; g < groups.size(); ++g) {
        std::int64_t sum = 0;
        for (const std::int64_t item : groups[g]) sum += lengths[item];
        EXPECT_LE(sum, capacity);
        EXPECT_GT(sum, 0);
        EXPECT_TRUE(std::is_sorted(groups[g].begin(), groups[g].end()));
      }
      if (count == 1000) {
        EXPECT_GT(static_cast<double>(total), 0.97 * static_cast<double>(groups.size() * capacity));
      }
    }
  }
}

TEST(Packing, NamesTheItemThatIsTooLong) {
  const std::vector<std::int64_t> lengths = {3, 11};
  try {
    pack_best_fit(iota(2), lengths, 10);
    FAIL();
  } catch (const DataError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("row 1 has 11 tokens, more than the 10"));
  }
}

}  // namespace
}  // namespace heddle::data
