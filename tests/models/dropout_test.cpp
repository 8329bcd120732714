#include "adapters/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "data/batch.h"
#include "ops/linear/dropout.h"

namespace heddle::adapters {
namespace {

at::Tensor numbers(std::int64_t first, std::int64_t last) {
  return at::arange(first, last, at::kLong);
}

/// Dropped elements of a layer's input in a step.
struct Masks {
  std::uint64_t seed;
  const char* module;
  std::uint64_t step;

  at::Tensor of(const at::Tensor& tokens, const at::Tensor& features, double probability,
                c10::ScalarType dtype) const {
    return ops::dropout_factors(
        {dropout_key(seed, module), ops::dropout_draws(tokens, step), features, probability},
        dtype);
  }
};

TEST(DropoutMask, IsAFunctionOfTokenAndFeatureAlone) {
  const Masks masks{7, "model.layers.0.mlp.up_proj", 3};
  // Larger than what is made at a time.
  const at::Tensor tokens = numbers(5, 5005), features = numbers(0, 1024);
  const at::Tensor whole = masks.of(tokens, features, 0.25, at::kFloat);
  const at::Tensor part =
      masks.of(tokens.narrow(0, 4100, 70), features.narrow(0, 512, 30), 0.25, at::kFloat);
  EXPECT_TRUE(at::equal(part, whole.narrow(0, 4100, 70).narrow(1, 512, 30)));
}

TEST(DropoutMask, DropsWhatItShouldAndKeepsTheMean) {
  const Masks masks{7, "a", 1};
  for (const double probability : {0.05, 0.5}) {
    const at::Tensor mask = masks.of(numbers(0, 2000), numbers(0, 500), probability, at::kDouble);
    const double deviation = std::sqrt(probability * (1 - probability) / 1e6);
    EXPECT_NEAR(mask.eq(0).to(at::kDouble).mean().item<double>(), probability, 4 * deviation);
    // The probability is rounded to 16 bits.
    EXPECT_NEAR(mask.max().item<double>(), 1 / (1 - probability), 2e-5);
    // Neither rows nor columns share their masks.
    const at::Tensor zeros = mask.eq(0).to(at::kDouble);
    for (const std::int64_t dim : {0, 1}) {
      const auto other = zeros.roll(1, dim);
      const double both = (zeros * other).mean().item<double>();
      EXPECT_NEAR(both, probability * probability, 4e-3) << dim;
    }
  }
}

TEST(DropoutMask, DiffersBetweenStepsLayersAndSeeds) {
  const auto mask = [](const Masks& masks) {
    return masks.of(numbers(0, 64), numbers(0, 64), 0.5, at::kFloat);
  };
  const at::Tensor first = mask({1, "a", 1});
  EXPECT_TRUE(at::equal(first, mask({1, "a", 1})));
  for (const Masks& other : {Masks{1, "a", 2}, Masks{1, "b", 1}, Masks{2, "a", 1}})
    EXPECT_NEAR(first.eq(mask(other)).to(at::kDouble).mean().item<double>(), 0.5, 0.05);
}

TEST(TokenNumbers, AreThoseOfRowAndPlaceWhereverTheyLie) {
  const std::vector<std::int32_t> tokens(6, 1), labels(6, -100);
  const std::vector<float> weights(6, 0);
  const auto view = [&](std::int64_t row, std::size_t size) {
    return data::SequenceView{
        {tokens.data(), size}, {labels.data(), size}, {weights.data(), size}, row};
  };
  const auto numbers_of = [](const std::vector<data::SequenceView>& rows) {
    data::Batch batch = data::Batch::from_sequences(rows);
    batch.number_tokens();
    return batch.token_numbers;
  };
  const at::Tensor one = numbers_of({view(3, 4), view(9, 6)}), two = numbers_of({view(9, 6)});
  EXPECT_TRUE(at::equal(one.narrow(0, 4, 6), two));
  const auto* number = one.const_data_ptr<std::int64_t>();
  EXPECT_EQ(std::set<std::int64_t>(number, number + one.numel()).size(), 10u);
}

}  // namespace
}  // namespace heddle::adapters
