#include "objective/advantages.h"

#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "base/rng.h"

namespace heddle::objective {
namespace {

using Numbers = std::vector<double>;

Numbers of(Advantage kind, const Numbers& rewards, const std::vector<std::int64_t>& lengths = {}) {
  return group_advantages(kind, rewards, lengths);
}

void expect_near(const Numbers& found, const Numbers& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-12) << i;
}

TEST(Advantages, OfAGroup) {
  const Numbers rewards = {1, 0, 0, 2};  // mean 0.75, std sqrt(2.75 / 3)
  const double std = std::sqrt(2.75 / 3) + 1e-6;
  expect_near(of(Advantage::kGrpo, rewards), {0.25 / std, -0.75 / std, -0.75 / std, 1.25 / std});
  expect_near(of(Advantage::kDrGrpo, rewards), {0.25, -0.75, -0.75, 1.25});
  expect_near(of(Advantage::kRloo, rewards), {1 - 2. / 3, -1, -1, 2 - 1. / 3});
  expect_near(of(Advantage::kReinforcePlusPlus, rewards), rewards);
  expect_near(of(Advantage::kReinforcePlusPlusBaseline, rewards), {0.25, -0.75, -0.75, 1.25});
  const double optimal = (10 * 1 + 40 * 2) / 100.;
  expect_near(of(Advantage::kOpo, rewards, {10, 20, 30, 40}),
              {1 - optimal, -optimal, -optimal, 2 - optimal});
}

TEST(Advantages, OfEqualRewardsAreZero) {
  for (const Advantage kind : {Advantage::kGrpo, Advantage::kDrGrpo, Advantage::kRloo,
                               Advantage::kReinforcePlusPlusBaseline, Advantage::kOpo})
    expect_near(of(kind, {0.5, 0.5, 0.5}, {1, 2, 3}), {0, 0, 0});
}

TEST(Advantages, OfAGroupOfOne) {
  expect_near(of(Advantage::kGrpo, {3}), {3 / (1 + 1e-6)});
  expect_near(of(Advantage::kRloo, {3}), {3});
}

TEST(Advantages, ReturnsPassMaskedTokensOver) {
  const Numbers rewards = {0, -0.5, 9, 0, 2};
  const std::vector<float> mask = {1, 1, 0, 1, 1};
  expect_near(discounted_returns(rewards, mask, 0.5),
              {0.5 * (-0.5 + 0.5 * 0.5 * 2), -0.5 + 0.5 * 0.5 * 2, 0, 1, 2});
}

TEST(Advantages, GaeIsTheSumOfLaterDifferences) {
  const CounterRng rng(7, "gae");
  std::uint64_t drawn = 0;
  const auto draw = [&] { return static_cast<double>(rng.below(drawn++, 2001)) / 1000 - 1; };
  for (const std::size_t n : {1u, 2u, 9u, 40u}) {
    for (const double masked : {0.0, 0.4, 1.0}) {
      for (const auto& [gamma, lambda] :
           {std::pair{1.0, 1.0}, {0.9, 0.95}, {1.0, 0.0}, {0.5, 1.0}}) {
        Numbers rewards, values;
        std::vector<float> mask;
        for (std::size_t t = 0; t < n; ++t) {
          rewards.push_back(draw());
          values.push_back(draw());
          mask.push_back(draw() * 0.5 + 0.5 < masked ? 0.F : 1.F);
        }
        // Tokens that the policy drew, without those between.
        std::vector<std::size_t> own;
        for (std::size_t t = 0; t < n; ++t)
          if (mask[t] != 0) own.push_back(t);
        Numbers advantages(n), returns(n);
        for (std::size_t i = 0; i < own.size(); ++i) {
          for (std::size_t l = 0; i + l < own.size(); ++l) {
            const double next = i + l + 1 < own.size() ? values[own[i + l + 1]] : 0;
            advantages[own[i]] += std::pow(gamma * lambda, static_cast<double>(l)) *
                                  (rewards[own[i + l]] + gamma * next - values[own[i + l]]);
          }
          returns[own[i]] = advantages[own[i]] + values[own[i]];
        }
        const TokenEstimates found = gae(rewards, values, mask, gamma, lambda);
        expect_near(found.advantages, advantages);
        expect_near(found.returns, returns);
        // With lambda 1 the critic's values cancel out of the returns.
        if (lambda == 1) expect_near(found.returns, discounted_returns(rewards, mask, gamma));
      }
    }
  }
}

TEST(Advantages, WhiteningCountsEveryValueAsOftenAsItStands) {
  Numbers values = {1, 2, 6}, expanded = {1, 2, 2, 2, 6, 6};
  whiten(values, Numbers{1, 3, 2});
  whiten(expanded, Numbers(6, 1));
  expect_near(values, {expanded[0], expanded[1], expanded[4]});
  double sum = 0, squares = 0;
  for (const double value : expanded) sum += value, squares += value * value;
  EXPECT_NEAR(sum, 0, 1e-12);
  EXPECT_NEAR(squares / 5, 1, 1e-6);
  Numbers equal = {4, 4};
  whiten(equal, Numbers{1, 1});
  expect_near(equal, {0, 0});
}

}  // namespace
}  // namespace heddle::objective
