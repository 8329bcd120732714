#include "objective/value_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace heddle::objective {
namespace {

/// By its definition, one token at a time.
double formula(double value, double old, double target, double clip) {
  const double bounded = std::clamp(value, old - clip, old + clip);
  return 0.5 *
         std::max((value - target) * (value - target), (bounded - target) * (bounded - target));
}

TEST(ValueLoss, EqualsItsDefinitionAndSlope) {
  constexpr double kClip = 0.5, kStep = 1e-6;
  // Within the bounds; beyond them towards the return and past it, and away from it; on both sides.
  const std::vector<double> values = {1.2, 1.7, 1.7, 1.7, 0.2, 0.2, 0.2, 1.0, -3.0},
                            old = {1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0},
                            returns = {2.0, 3.0, 1.0, 1.55, -1.0, 1.0, 0.45, 1.0, 4.0};
  const auto t = [](const std::vector<double>& numbers) {
    return at::tensor(numbers, at::kDouble);
  };
  const ValueLossResult found = value_loss(t(values), t(old), t(returns), kClip);
  int clipped = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto k = static_cast<std::int64_t>(i);
    const auto at = [&](double value) { return formula(value, old[i], returns[i], kClip); };
    EXPECT_NEAR(found.loss[k].item<double>(), at(values[i]), 1e-12) << i;
    EXPECT_NEAR(found.d_values[k].item<double>(),
                (at(values[i] + kStep) - at(values[i] - kStep)) / (2 * kStep), 1e-6)
        << i;
    const bool is_flat = at(values[i] + kStep) == at(values[i]);
    EXPECT_EQ(found.clipped[k].item<bool>(), is_flat) << i;
    clipped += is_flat;
  }
  EXPECT_EQ(clipped, 2);
}

// Where old and V differ much in size, old + (V - old) is another number than V.
TEST(ValueLoss, NothingWithinTheBoundsIsClipped) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const at::Tensor values = at::linspace(-0.4, 0.4, 4096, type),
                     old = at::linspace(0.06, 0.05, 4096, type),
                     returns = at::linspace(1, -1, 4096, type);
    ASSERT_FALSE((old + (values - old)).equal(values));
    const ValueLossResult found = value_loss(values, old, returns, 0.5);
    EXPECT_FALSE(found.clipped.any().item<bool>());
    EXPECT_TRUE(found.d_values.equal(values - returns));
  }
}

TEST(ValueLoss, WithoutBoundsIsHalfTheSquare) {
  const at::Tensor values = at::tensor({1.0, 9.0}, at::kDouble),
                   old = at::tensor({0.0, 0.0}, at::kDouble),
                   returns = at::tensor({3.0, 1.0}, at::kDouble);
  const ValueLossResult found = value_loss(values, old, returns, 0);
  EXPECT_TRUE(found.loss.equal(at::tensor({2.0, 32.0}, at::kDouble)));
  EXPECT_TRUE(found.d_values.equal(at::tensor({-2.0, 8.0}, at::kDouble)));
  EXPECT_FALSE(found.clipped.any().item<bool>());
}

}  // namespace
}  // namespace heddle::objective
