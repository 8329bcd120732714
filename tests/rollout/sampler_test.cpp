#include "rollout/sampler.h"

#include <cmath>
#include <set>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace heddle::rollout {
namespace {

constexpr std::uint64_t kDraws = 40000;

std::vector<float> logits() { return {0.5F, -1.0F, 2.0F, 0.5F, -3.0F, 1.0F}; }

/// Softmax of logits / temperature.
std::vector<double> probabilities(const std::vector<float>& values, double temperature) {
  std::vector<double> out;
  double sum = 0;
  for (const float value : values) sum += out.emplace_back(std::exp(value / temperature));
  for (double& p : out) p /= sum;
  return out;
}

std::vector<double> shares(const SamplingOptions& options) {
  std::vector<double> counts(logits().size());
  for (std::uint64_t i = 0; i < kDraws; ++i) ++counts[sample(logits(), options, i).id];
  for (double& count : counts) count /= kDraws;
  return counts;
}

/// Each share within four standard deviations of its probability.
void expect_shares(const std::vector<double>& shares, const std::vector<double>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double sigma = std::sqrt(expected[i] * (1 - expected[i]) / kDraws);
    EXPECT_NEAR(shares[i], expected[i], 4 * sigma + 1e-12) << "token " << i;
  }
}

TEST(Sampler, DrawsByTheProbabilitiesAtTheTemperature) {
  for (const double temperature : {1.0, 0.6, 2.5}) {
    expect_shares(shares({.temperature = temperature, .seed = 3}),
                  probabilities(logits(), temperature));
  }
}

TEST(Sampler, TemperatureZeroTakesTheMostLikelyAndOfEqualsTheLowest) {
  EXPECT_EQ(sample(logits(), {.temperature = 0}, 0).id, 2);
  const std::vector<float> equal = {1, 4, 4, 2, 4};
  EXPECT_EQ(sample(equal, {.temperature = 0}, 5).id, 1);
}

TEST(Sampler, CutsToTheMostLikelyTokens) {
  // The three most likely; of the two at 0.5 the lower id.
  const std::vector<double> all = probabilities(logits(), 1);
  const double sum = all[2] + all[5] + all[0];
  expect_shares(shares({.top_k = 3}), {all[0] / sum, 0, all[2] / sum, 0, 0, all[5] / sum});
}

TEST(Sampler, CutsToTheSmallestSetOfAProbability) {
  const std::vector<double> all = probabilities(logits(), 1);
  // The first reaches top_p alone; then the second is needed too.
  expect_shares(shares({.top_p = all[2] - 0.01}), {0, 0, 1, 0, 0, 0});
  const double sum = all[2] + all[5];
  expect_shares(shares({.top_p = all[2] + 0.01}), {0, 0, all[2] / sum, 0, 0, all[5] / sum});
}

TEST(Sampler, TellsTheLogarithmOfTheModelsOwnProbability) {
  const std::vector<double> all = probabilities(logits(), 1);
  for (std::uint64_t i = 0; i < 50; ++i) {
    const SampledToken token = sample(logits(), {.temperature = 0.3, .top_p = 0.9, .top_k = 4}, i);
    EXPECT_NEAR(token.logprob, std::log(all[token.id]), 1e-6);
  }
}

TEST(Sampler, DependsOnSeedAndPosition) {
  const auto sequence = [](std::uint64_t seed) {
    std::vector<std::int32_t> ids;
    for (std::uint64_t i = 0; i < 40; ++i) ids.push_back(sample(logits(), {.seed = seed}, i).id);
    return ids;
  };
  EXPECT_EQ(sequence(1), sequence(1));
  EXPECT_NE(sequence(1), sequence(2));
  const std::vector<std::int32_t> one = sequence(1);
  EXPECT_GT(std::set<std::int32_t>(one.begin(), one.end()).size(), 2u);
}

TEST(Sampler, RowsOfAFileHaveStreamsOfTheirOwn) {
  std::set<std::uint64_t> seeds;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    for (std::uint64_t row = 0; row < 50; ++row) seeds.insert(seed_of_row(seed, row));
  }
  EXPECT_EQ(seeds.size(), 200u);
  EXPECT_EQ(seed_of_row(3, 7), seed_of_row(3, 7));
}

}  // namespace
}  // namespace heddle::rollout
