#include "bench/operator_cases.h"

#include <gtest/gtest.h>

#include "base/errors.h"
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

/// Bytes are those of the weights and of the rows in and out; 8-bit experts are refused by name.
TEST(OperatorCases, ExpertsAsTheyAreKept) {
  const models::Config config = models::preset("small-moe");
  const nn::MoeDims& moe = *config.moe();
  const ops::NoGradient guard;
  const OperatorCase one = expert_cases(kFloat, config, {1, 32, 0}).at(0)();
  ASSERT_EQ(one.calls.size(), 3u);
  for (const OperatorCall& call : one.calls) EXPECT_NO_THROW(call.run()) << call.name;
  const auto matrix = static_cast<double>(moe.hidden_size * moe.moe_intermediate_size);
  EXPECT_EQ(one.calls[0].bytes, 4 * (2. * 32 * static_cast<double>(moe.hidden_size) +
                                     3 * static_cast<double>(moe.num_experts) * matrix));
  OperatorPlace eight_bits = kBfloat16;
  eight_bits.policy.named["frozen_experts"] = "cuda.fp8";
  const CaseMaker refused = expert_cases(eight_bits, config, {1, 32, 0}).at(0);
  EXPECT_THROW(refused(), Error);
}

}  // namespace
}  // namespace heddle::bench
