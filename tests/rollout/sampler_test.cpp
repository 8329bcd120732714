#include "rollout/sampler.h"
#include "ops/sampling/sampling.h"

#include <ATen/ops/tensor.h>

#include <cmath>
#include <set>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace heddle::rollout {
namespace {

constexpr std::int64_t kDraws = 40000;

std::vector<float> logits() { return {0.5F, -1.0F, 2.0F, 0.5F, -3.0F, 1.0F}; }

/// Softmax of logits / temperature.
std::vector<double> probabilities(const std::vector<float>& values, double temperature) {
  std::vector<double> out;
  double sum = 0;
  for (const float value : values) sum += out.emplace_back(std::exp(value / temperature));
  for (double& p : out) p /= sum;
  return out;
}

/// Tokens of the positions 0, 1, ... of a stream, all of the same logits.
std::vector<SampledToken> draw(const std::vector<float>& values, const SamplingOptions& options,
                               std::int64_t count) {
  const auto kernels = ops::KernelTable::choose(ops::builtin_registry(), {}, at::kFloat,
                                                {ops::OpRequest::of<ops::SampleTokens>()});
  std::vector<Draw> draws;
  for (std::int64_t i = 0; i < count; ++i)
    draws.push_back({options, static_cast<std::uint64_t>(i)});
  return sample(kernels, at::tensor(values).expand({count, -1}), draws);
}

std::vector<double> shares(const SamplingOptions& options) {
  std::vector<double> counts(logits().size());
  for (const SampledToken& token : draw(logits(), options, kDraws)) ++counts[token.id];
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
  EXPECT_EQ(draw(logits(), {.temperature = 0}, 1)[0].id, 2);
  const std::vector<float> equal = {1, 4, 4, 2, 4};
  EXPECT_EQ(draw(equal, {.temperature = 0}, 6)[5].id, 1);
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
  for (const SampledToken& token :
       draw(logits(), {.temperature = 0.3, .top_p = 0.9, .top_k = 4}, 50)) {
    EXPECT_NEAR(token.logprob, std::log(all[token.id]), 1e-6);
  }
}

TEST(Sampler, DependsOnSeedAndPosition) {
  const auto sequence = [](std::uint64_t seed) {
    std::vector<std::int32_t> ids;
    for (const SampledToken& token : draw(logits(), {.seed = seed}, 40)) ids.push_back(token.id);
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
