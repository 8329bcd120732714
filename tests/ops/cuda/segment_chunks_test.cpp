// Sequences that the CUDA gated delta rule splits, on a device like an H200; needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "ops/gated_delta_net/cuda/gated_delta_net.h"

namespace heddle::ops::cuda {
namespace {

constexpr int kMultiprocessors = 132, kWhole = std::numeric_limits<int>::max();

int chosen(int v_heads, const std::vector<int>& lengths, bool known = true) {
  GatedDeltaNetShape shape;
  shape.tokens = std::accumulate(lengths.begin(), lengths.end(), 0);
  shape.sequences = static_cast<int>(lengths.size());
  shape.k_heads = shape.v_heads = v_heads;
  shape.longest = known ? *std::max_element(lengths.begin(), lengths.end()) : 0;
  return gated_delta_net_segment_chunks(shape, kMultiprocessors);
}

/// Splits that were measured to pay (src/ops/gated_delta_net/cuda/README.md).
TEST(GatedDeltaRuleSegments, EqualLengths) {
  for (const bool known : {false, true}) {
    EXPECT_EQ(chosen(8, {32768}, known), 32);
    EXPECT_EQ(chosen(8, {8192}, known), 16);
    EXPECT_EQ(chosen(8, {2048}, known), 7);
    EXPECT_EQ(chosen(16, {32768}, known), 64);
    EXPECT_EQ(chosen(24, {32768}, known), 47);
    EXPECT_EQ(chosen(24, {8192}, known), 26);
    EXPECT_EQ(chosen(32, {8192}, known), 32);
    EXPECT_EQ(chosen(48, {32768}, known), 64);
    EXPECT_EQ(chosen(8, {8192, 8192, 8192, 8192}, known), 32);
    EXPECT_EQ(chosen(16, {8192, 8192, 8192, 8192}, known), kWhole);
  }
}

TEST(GatedDeltaRuleSegments, TheLongestOfUnevenSequencesDecides) {
  for (const int v_heads : {24, 32, 48, 64}) {
    const int long_first = chosen(v_heads, {28672, 4096});
    EXPECT_LT(long_first, 100) << v_heads;
    EXPECT_EQ(chosen(v_heads, {4096, 28672}), long_first) << v_heads;
    EXPECT_EQ(chosen(v_heads, {28672, 4096}, /*known=*/false), kWhole) << v_heads;
  }
  std::vector<int> beside_short(25, 500);
  beside_short.push_back(20000);
  EXPECT_LT(chosen(16, beside_short), 100);
  EXPECT_LT(chosen(16, {2048, 0, 0, 0, 0, 0, 0, 0}), 16);
  EXPECT_LT(chosen(2, {40, 2600, 0, 65}), 40);
}

TEST(GatedDeltaRuleSegments, FullMachinesSplitNothing) {
  // One long sequence that is over before the short ones are.
  std::vector<int> many_short(15, 1024);
  many_short.push_back(8192);
  EXPECT_EQ(chosen(48, many_short), kWhole);
  EXPECT_EQ(chosen(48, {0, 0}), kWhole);
}

TEST(GatedDeltaRuleSegments, AGivenLengthStands) {
  GatedDeltaNetShape shape{32768, 1, 8, 8};
  shape.segment_chunks = 5;
  EXPECT_EQ(gated_delta_net_segment_chunks(shape, kMultiprocessors), 5);
}

}  // namespace
}  // namespace heddle::ops::cuda
