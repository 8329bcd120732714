#include "bench/operator_cases.h"

#include <gtest/gtest.h>

#include "models/registry.h"
#include "ops/autograd.h"

namespace heddle::bench {
namespace {

const OperatorPlace kBfloat16 = {c10::Device(at::kCPU), at::kBFloat16, {true, {}}};
const OperatorPlace kFloat = {c10::Device(at::kCPU), at::kFloat, {true, {}}};

/// All shapes of the forward's and the backward's table, two of which are in both.
TEST(OperatorCases, PublishedShapesOfTheGatedDeltaRule) {
  EXPECT_EQ(published_gated_delta_rule_cases(kFloat, {}).size(), 8u * 19 + 4 * 8 - 2);
  EXPECT_EQ(published_gated_delta_rule_cases(kFloat, {{{16, 48}}, {}}).size(), 19u);
  EXPECT_EQ(published_gated_delta_rule_cases(kFloat, {{}, {"28672+4096"}}).size(), 8u);
  EXPECT_EQ(published_gated_delta_rule_cases(kFloat, {{}, {"1 x 8192"}}).size(), 8u + 3);
  const auto one =
      published_gated_delta_rule_cases(kFloat, {{{2, 4}}, {"5809+1244+406+733", "7053+1139"}});
  ASSERT_EQ(one.size(), 2u);
  EXPECT_EQ(one[0]().name, "2/4 heads of 128, 5809+1244+406+733");
}

/// Each kind of state is one that the optimizer takes, and its bytes are those of the parameters.
TEST(OperatorCases, AdamwWithEachKindOfState) {
  nlohmann::ordered_json json = models::preset_json("small-10m");
  json["vocab_size"] = 64;
  json["intermediate_size"] = 256;
  const models::Config config = models::parse_config(json, "test");
  const ops::NoGradient guard;
  std::vector<double> bytes;
  for (const OperatorPlace& place : {kFloat, kBfloat16}) {
    for (const CaseMaker& make : adamw_cases(place, config, {})) {
      const OperatorCase one = make();
      ASSERT_EQ(one.calls.size(), 1u);
      EXPECT_NO_THROW(one.calls[0].run()) << one.name;
      bytes.push_back(one.calls[0].bytes);
    }
  }
  ASSERT_EQ(bytes.size(), 4u);
  // Per parameter 28 in fp32, 30 with master and bf16 weight, 14 in bf16, 10 and scales in 8 bit.
  EXPECT_NEAR(bytes[1] / bytes[0], 30. / 28, 1e-12);
  EXPECT_NEAR(bytes[2] / bytes[0], 14. / 28, 1e-12);
  EXPECT_NEAR(bytes[3] / bytes[0], 10.0625 / 28, 1e-12);
}

}  // namespace
}  // namespace heddle::bench
