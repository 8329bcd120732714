#include "sync/manifest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>

#include "base/errors.h"
#include "sync/checksum.h"
#include "sync/part.h"

namespace heddle::sync {
namespace {

std::vector<TensorInfo> tensors() {
  return {{"b", {100, 64}, at::kFloat}, {"a", {7}, at::kBFloat16}, {"c", {3, 5000}, at::kFloat}};
}

TEST(Manifest, CutsTensorsAtRowsIntoBuckets) {
  const Manifest manifest(tensors(), 4096);
  std::vector<std::int64_t> next(3, 0);
  for (const Bucket& bucket : manifest.buckets()) {
    std::int64_t end = 0;
    for (const Rows& rows : bucket.rows) {
      EXPECT_EQ(rows.first, next[rows.tensor]);
      EXPECT_EQ(rows.offset % 16, 0);
      EXPECT_GE(rows.offset, end);
      next[rows.tensor] += rows.count;
      end = rows.offset + rows.count * manifest.tensors()[rows.tensor].row_bytes();
    }
    EXPECT_LE(end, bucket.bytes);
    EXPECT_TRUE(bucket.bytes <= 4096 || bucket.rows.size() == 1) << bucket.bytes;
  }
  EXPECT_EQ(next, (std::vector<std::int64_t>{7, 100, 3}));
  EXPECT_EQ(manifest.largest_bucket(), 20000);
}

TEST(Manifest, DoesNotDependOnTheOrderOfItsTensors) {
  auto other = tensors();
  std::swap(other[0], other[2]);
  EXPECT_EQ(Manifest(tensors(), 4096).hash(), Manifest(other, 4096).hash());
}

TEST(Manifest, NamesTheFirstDifference) {
  auto other = tensors();
  other[2].dtype = at::kHalf;
  const Manifest a(tensors(), 4096), b(other, 4096);
  EXPECT_NE(a.hash(), b.hash());
  EXPECT_EQ(first_difference(a.text(), b.text()),
            "'c Float [3, 5000]' here, 'c Half [3, 5000]' there");
  EXPECT_NE(Manifest(tensors(), 8192).hash(), a.hash());
  EXPECT_THROW(Manifest(tensors(), 16), ConfigError);
  other.push_back(other[0]);
  EXPECT_THROW(Manifest(other, 4096), InternalError);
}

TEST(Checksum, SeesEveryBitAndEveryPlace) {
  std::vector<std::uint8_t> bytes(1003);
  for (std::size_t k = 0; k < bytes.size(); ++k) bytes[k] = static_cast<std::uint8_t>(k * 37);
  const std::uint64_t sum = checksum(bytes, 5);
  EXPECT_NE(sum, checksum(bytes, 6));
  for (std::size_t k = 0; k < bytes.size(); k += 13) {
    auto damaged = bytes;
    damaged[k] ^= static_cast<std::uint8_t>(1u << (k % 8));
    EXPECT_NE(checksum(damaged, 5), sum);
  }
  auto moved = bytes;
  std::swap_ranges(moved.begin(), moved.begin() + 8, moved.begin() + 64);
  EXPECT_NE(checksum(moved, 5), sum);
  EXPECT_NE(checksum(std::span(bytes).first(1002), 5), sum);
  EXPECT_NE(checksum(std::vector<std::uint8_t>(8), 5), checksum(std::vector<std::uint8_t>(16), 5));
}

TEST(HeldRegions, IsReadAgainAndChecked) {
  HeldRegions first, second;
  first.tensors = second.tensors = {{"w", {4, 6}, at::kFloat}};
  first.regions = {{{{0, 0}, {2, 6}}}};
  second.regions = {{{{2, 0}, {2, 3}}, {{2, 3}, {2, 3}}}};
  const HeldRegions again = HeldRegions::from_text(second.to_text());
  EXPECT_EQ(again.tensors, second.tensors);
  EXPECT_EQ(again.to_text(), second.to_text());
  EXPECT_NO_THROW(require_each_element_once({first, second}));
  EXPECT_THROW(require_each_element_once({first}), InternalError);
  second.regions[0][0].offset[0] = 1;
  EXPECT_THROW(require_each_element_once({first, second}), InternalError);
}

}  // namespace
}  // namespace heddle::sync
