#include "ops/embedding/noise.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cmath>

#include "ops/linear/dropout.h"
#include "ops/operator_support.h"

namespace heddle::ops::testing {
namespace {

at::Tensor draws(std::int64_t first, std::int64_t count, std::uint64_t step) {
  return dropout_draws(
      at::arange(first, first + count, at::TensorOptions(at::kLong).device(device())), step);
}
at::Tensor scales(std::int64_t count, double scale) {
  return at::full({count}, scale, at::TensorOptions(at::kFloat).device(device()));
}

TEST(EmbeddingNoise, IsUniformWithinItsScale) {
  const at::Tensor noise = embedding_noise(5, draws(0, 513, 3), scales(513, 0.25), 65, at::kFloat);
  EXPECT_EQ(noise.sizes(), at::IntArrayRef({513, 65}));
  EXPECT_LT(noise.abs().max().item<double>(), 0.25);
  EXPECT_GT(noise.max().item<double>(), 0.249);
  EXPECT_LT(noise.min().item<double>(), -0.249);
  const double deviations = 0.25 / std::sqrt(3.) / std::sqrt(513. * 65);
  EXPECT_LT(std::abs(noise.to(at::kDouble).mean().item<double>()), 5 * deviations);
  EXPECT_NEAR(noise.to(at::kDouble).square().mean().sqrt().item<double>(), 0.25 / std::sqrt(3.),
              0.002);
}

TEST(EmbeddingNoise, DependsOnKeyStepAndTokenAlone) {
  const at::Tensor all = embedding_noise(5, draws(0, 29, 3), scales(29, 1), 33, at::kDouble);
  const at::Tensor some = embedding_noise(5, draws(11, 7, 3), scales(7, 1), 33, at::kDouble);
  EXPECT_TRUE(some.equal(all.narrow(0, 11, 7)));
  EXPECT_FALSE(embedding_noise(6, draws(0, 29, 3), scales(29, 1), 33, at::kDouble).equal(all));
  EXPECT_FALSE(embedding_noise(5, draws(0, 29, 4), scales(29, 1), 33, at::kDouble).equal(all));
  EXPECT_FALSE(all[0].equal(all[1]));
}

TEST(EmbeddingNoise, HasTheScaleOfEachToken) {
  at::Tensor scale = scales(4, 1);
  scale[1] = 0.;
  scale[2] = 0.5;
  const at::Tensor whole = embedding_noise(5, draws(0, 4, 1), scales(4, 1), 9, at::kFloat);
  const at::Tensor noise = embedding_noise(5, draws(0, 4, 1), scale, 9, at::kFloat);
  EXPECT_TRUE(noise[0].equal(whole[0]));
  EXPECT_EQ(noise[1].abs().max().item<double>(), 0);
  EXPECT_TRUE(noise[2].equal(whole[2] * 0.5));
}

}  // namespace
}  // namespace heddle::ops::testing
