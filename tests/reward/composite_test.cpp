#include <gtest/gtest.h>

#include "base/errors.h"
#include "reward/reward.h"

namespace heddle::reward {
namespace {

Sample boxed(const std::string& text) {
  Sample sample;
  sample.completion = "<think>x</think><answer>" + text + "</answer>";
  sample.truth = 5;
  return sample;
}

TEST(Composite, AddsWeightedParts) {
  RewardOptions options;
  options.verifiers = {{"numeric", 1.0}, {"format", 0.25}};
  const auto reward = make_reward(options);
  const auto scores = reward->score(std::vector{boxed("5"), boxed("6")});
  ASSERT_EQ(scores.size(), 2u);
  EXPECT_DOUBLE_EQ(scores[0].reward, 1.25);
  EXPECT_DOUBLE_EQ(scores[1].reward, 0.25);
  EXPECT_DOUBLE_EQ(scores[1].parts.at("numeric"), 0);
  EXPECT_DOUBLE_EQ(scores[1].parts.at("format"), 1);
}

TEST(Composite, MultipliesParts) {
  RewardOptions options;
  options.verifiers = {{"numeric", 1.0},
                       {"length", 2.0, Json::parse(R"({"target": 0, "max": 10})")}};
  options.combine = Combine::kProduct;
  Sample sample = boxed("5");
  sample.tokens = {1, 2, 3, 4, 5};
  EXPECT_DOUBLE_EQ(make_reward(options)->score(std::vector{sample})[0].reward, 0.25);
}

TEST(Composite, TakesTheVerifierThatTheRowNames) {
  RewardOptions options;
  options.verifiers = {{"row"}};
  const auto reward = make_reward(options);
  std::vector<Sample> samples(4);
  samples[0].completion = samples[1].completion = "5";
  samples[0].truth = samples[1].truth = "5.0";
  samples[0].meta = {{"verifier", "numeric"}};
  samples[1].meta = {{"verifier", "exact"}};
  samples[2].meta = {{"verifier", "guess"}};
  const auto scores = reward->score(samples);
  EXPECT_DOUBLE_EQ(scores[0].reward, 1);
  EXPECT_DOUBLE_EQ(scores[1].reward, 0);
  EXPECT_NE(scores[2].error.value_or("").find("guess"), std::string::npos);
  EXPECT_NE(scores[3].error.value_or("").find("'verifier'"), std::string::npos);
}

TEST(Composite, NamesThePartThatCannotJudge) {
  RewardOptions options;
  options.verifiers = {{"numeric"}};
  Sample sample = boxed("5");
  sample.truth = "many";
  const Score score = make_reward(options)->score(std::vector{sample})[0];
  EXPECT_NE(score.error.value_or("").find("numeric: the truth must be a number"),
            std::string::npos);
}

TEST(Composite, RefusesTwoPartsOfOneName) {
  RewardOptions options;
  options.verifiers = {{"numeric"}, {"numeric"}};
  EXPECT_THROW(make_reward(options), ConfigError);
  options.verifiers[1].name = "again";
  EXPECT_NO_THROW(make_reward(options));
  options.verifiers[1].name = "mean";
  EXPECT_THROW(make_reward(options), ConfigError);
}

TEST(MakeReward, WantsExactlyOneSource) {
  EXPECT_THROW(make_reward({}), ConfigError);
  RewardOptions options;
  options.verifiers = {{"numeric"}};
  options.http.url = "http://localhost:1/";
  EXPECT_THROW(make_reward(options), ConfigError);
}

}  // namespace
}  // namespace heddle::reward
