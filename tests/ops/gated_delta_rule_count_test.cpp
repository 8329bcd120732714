// The products of the chunked form that NPUs train with, counted as libtorch runs them.
#include <ATen/ops/ones_like.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "ops/builtin.h"
#include "ops/gated_delta_rule_support.h"
#include "ops/product_counter.h"

namespace heddle::ops {
namespace {

using testing::any;
using testing::Case;
using testing::make;
using testing::Problem;
using testing::ProductCounter;

struct Count {
  double forward = 0,
         backward = 0;  ///< In units of 64 x 64 x 128 multiplications per chunk and head.
  std::int64_t products = 0;
};

Count count(const Case& c) {
  const Problem p = make(c, at::kFloat);
  const auto functions =
      testing::table_of(any<GatedDeltaRule>(), "npu.chunk64", at::kFloat, {Platform::kSim})
          .get<GatedDeltaRule>();
  GatedDeltaRule::Inputs in{p.inputs[0], p.inputs[1], p.inputs[2], p.inputs[3],
                            p.inputs[4], {},          p.sequences, p.options};
  std::int64_t chunks = 0;
  for (const std::int32_t n : c.lengths) chunks += (n + 63) / 64;
  const double unit = 64.0 * 64 * 128 * static_cast<double>(chunks * c.Hk * c.group);
  Count result;
  GatedDeltaRuleForward out;
  {
    const ProductCounter counter;
    out = functions.forward(in, true);
    result.forward = static_cast<double>(counter.multiplications) / unit;
    result.products = counter.products;
  }
  const ProductCounter counter;
  functions.backward(in, out, at::ones_like(out.o), {});
  result.backward = static_cast<double>(counter.multiplications) / unit;
  result.products += counter.products;
  return result;
}

// docs/gdn.md: 10 units forward; backward 21 and 2 for the states that the forward need not keep.
constexpr double kLeastForward = 10, kLeastBackward = 21;

TEST(GatedDeltaRuleCount, MultiplicationsAreThoseOfTheChunkedForm) {
  for (const std::int64_t group : {1, 2}) {
    Case c;
    c.lengths = {256, 64, 192};
    c.Hk = 2;
    c.group = group;
    c.K = c.V = 128;
    const Count found = count(c);
    std::printf("group %d: forward %.2f (least %.0f), backward %.2f (least %.0f)\n",
                static_cast<int>(group), found.forward, kLeastForward, found.backward,
                kLeastBackward);
    EXPECT_GE(found.forward, 0.9 * kLeastForward) << "products escaped the counter";
    EXPECT_LE(found.forward + found.backward, 1.5 * (kLeastForward + kLeastBackward));
    EXPECT_LE(found.forward, 1.5 * kLeastForward);
    EXPECT_LE(found.backward, 1.5 * kLeastBackward);
  }
}

/// A loop over tokens would run more products for a longer chunk; these are as many for 1 token as
/// for 64, and grow with the chunks of the longest sequence alone.
TEST(GatedDeltaRuleCount, NoLoopRunsOverTokensOrSequences) {
  const auto products = [](std::vector<std::int32_t> lengths) {
    Case c;
    c.lengths = std::move(lengths);
    return count(c).products;
  };
  const std::int64_t one = products({1});
  EXPECT_EQ(products({64}), one);
  EXPECT_EQ(products({64, 13, 1, 50, 64}), one);
  const std::int64_t two = products({128}), three = products({192});
  EXPECT_EQ(three - two, two - one) << "each further chunk costs the same";
  EXPECT_LE(two - one, 6);
}

}  // namespace
}  // namespace heddle::ops
