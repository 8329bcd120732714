#include "ops/sampling/sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <limits>
#include <set>

#include "ops/builtin.h"
#include "ops/operator_support.h"
#include "ops/sampling/mass.h"

namespace heddle::ops::testing {
namespace {

KernelTable table() { return table_of(any<SampleTokens>(), kOwn, at::kFloat); }

/// `draws` rows of the same logits, at positions 0, 1, ... of one stream.
SampleTokens::Inputs many(const at::Tensor& logits, std::int64_t draws, double temperature = 1,
                          std::int64_t top_k = 0, double top_p = 1, double min_p = 0) {
  const auto number = at::TensorOptions().dtype(at::kLong).device(logits.device());
  const auto wide = number.dtype(at::kDouble);
  return {logits.expand({draws, logits.size(-1)}).contiguous(),
          at::full({draws}, temperature, number.dtype(at::kFloat)),
          at::full({draws}, top_p, wide),
          at::full({draws}, min_p, wide),
          at::full({draws}, top_k, number),
          at::full({draws}, 5, number),
          at::arange(draws, number)};
}

/// How often each token was drawn.
std::vector<double> shares(const SampleTokens::Inputs& in) {
  const at::Tensor ids = sample_tokens(table(), in).ids.cpu();
  std::vector<double> counts(static_cast<std::size_t>(in.logits.size(1)));
  for (std::int64_t i = 0; i < ids.size(0); ++i)
    counts[static_cast<std::size_t>(ids[i].item<std::int64_t>())] += 1.0 / ids.size(0);
  return counts;
}

TEST(SampleTokens, DrawsTheSoftmaxAtTheTemperature) {
  const at::Tensor logits = randn({7}, at::kFloat, 1) * 2;
  for (const double temperature : {0.5, 1.0, 3.0}) {
    const at::Tensor p = at::softmax(logits.to(at::kDouble) / temperature, 0).cpu();
    const std::vector<double> found = shares(many(logits, 20000, temperature));
    for (std::size_t i = 0; i < found.size(); ++i) {
      const double expected = p[static_cast<std::int64_t>(i)].item<double>();
      EXPECT_NEAR(found[i], expected, 4 * std::sqrt(expected / 20000) + 1e-4) << temperature << i;
    }
  }
}

TEST(SampleTokens, AtTemperatureZeroTheLowestOfTheMostLikelyIds) {
  const at::Tensor logits = at::tensor({1.0, 3.0, -2.0, 3.0}, at::kFloat).to(device());
  const auto tokens = sample_tokens(table(), many(logits, 1, 0));
  EXPECT_EQ(tokens.ids.item<std::int64_t>(), 1);
  EXPECT_NEAR(tokens.logprobs.item<double>(),
              at::log_softmax(logits.cpu().to(at::kDouble), 0)[1].item<double>(), 1e-6);
}

std::set<std::size_t> drawn(const SampleTokens::Inputs& in) {
  std::set<std::size_t> ids;
  const std::vector<double> found = shares(in);
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] > 0) ids.insert(i);
  }
  return ids;
}

TEST(SampleTokens, CutsKeepWhatTheySay) {
  // Probabilities 0.4, 0.1, 0.1, 0.1, 0.3; of equals the lowest ids are kept.
  const at::Tensor logits =
      at::tensor({std::log(0.4), std::log(0.1), std::log(0.1), std::log(0.1), std::log(0.3)},
                 at::kFloat)
          .to(device());
  using Ids = std::set<std::size_t>;
  EXPECT_EQ(drawn(many(logits, 2000, 1, 1)), (Ids{0}));
  EXPECT_EQ(drawn(many(logits, 2000, 1, 3)), (Ids{0, 1, 4}));
  EXPECT_EQ(drawn(many(logits, 2000, 1, 9)), (Ids{0, 1, 2, 3, 4}));
  EXPECT_EQ(drawn(many(logits, 2000, 1, 0, 0.3)), (Ids{0}));
  EXPECT_EQ(drawn(many(logits, 2000, 1, 0, 0.65)), (Ids{0, 4}));
  EXPECT_EQ(drawn(many(logits, 2000, 1, 0, 0.75)), (Ids{0, 1, 4}));
  EXPECT_EQ(drawn(many(logits, 2000, 1, 2, 0.99)), (Ids{0, 4})) << "a share of what top_k keeps";
  EXPECT_EQ(drawn(many(logits, 2000, 1, 0, 1, 0.5)), (Ids{0, 4}));
  EXPECT_EQ(drawn(many(logits, 2000, 1, 0, 1, 0.2)), (Ids{0, 1, 2, 3, 4}));
  const std::vector<double> renormalised = shares(many(logits, 20000, 1, 2));
  EXPECT_NEAR(renormalised[0], 4.0 / 7, 0.02);
}

TEST(SampleTokens, TheLogprobIsOfTheUncutDistribution) {
  const at::Tensor logits = randn({300}, at::kFloat, 2);
  const auto tokens = sample_tokens(table(), many(logits, 50, 0.7, 5));
  const at::Tensor exact = at::log_softmax(logits.cpu().to(at::kDouble), 0);
  for (std::int64_t i = 0; i < 50; ++i) {
    EXPECT_NEAR(tokens.logprobs[i].item<double>(),
                exact[tokens.ids[i].item<std::int64_t>()].item<double>(), 1e-6);
  }
}

TEST(SampleTokens, TellsWhatTheCutsKeepAndTheProbabilityAmongIt) {
  const at::Tensor logits = randn({300}, at::kFloat, 2);
  SampleTokens::Inputs in = many(logits, 50, 0.7, 9, 0.8);
  in.support = 9;
  const auto tokens = sample_tokens(table(), in);
  const at::Tensor exact = logits.cpu().to(at::kDouble) / 0.7, supports = tokens.supports.cpu();
  for (std::int64_t i = 0; i < 50; ++i) {
    const at::Tensor support = supports[i].masked_select(supports[i] >= 0);
    EXPECT_EQ(support.size(0), supports[0].masked_select(supports[0] >= 0).size(0));
    const auto id = tokens.ids[i].item<std::int64_t>();
    EXPECT_TRUE((support == id).any().item<bool>());
    const double expected =
        (exact[id] - at::logsumexp(exact.index_select(0, support), 0)).item<double>();
    EXPECT_NEAR(tokens.sampled_logprobs[i].item<double>(), expected, 4e-6);
  }
  const auto whole = sample_tokens(table(), many(logits, 50));
  EXPECT_TRUE(identical(whole.sampled_logprobs, whole.logprobs));
}

TEST(SampleTokens, ARowDependsOnNeitherItsNeighboursNorItsPlace) {
  SampleTokens::Inputs in = many(randn({1, 1000}, at::kFloat, 3), 20, 1.5, 40, 0.9);
  in.logits = randn({20, 1000}, at::kFloat, 4);
  const at::Tensor ids = sample_tokens(table(), in).ids;
  SampleTokens::Inputs one = in;
  for (at::Tensor* x : {&one.logits, &one.temperature, &one.top_p, &one.min_p, &one.top_k,
                        &one.seeds, &one.positions})
    *x = x->narrow(0, 13, 1).contiguous();
  EXPECT_TRUE(identical(sample_tokens(table(), one).ids, ids.narrow(0, 13, 1)));
}

TEST(SampleTokens, MassesFollowTheExponentialAndItsOrder) {
  std::uint64_t before = sampling::mass_of(0, 0, 1);
  EXPECT_EQ(before, std::uint64_t{1} << sampling::kMassBits);
  for (int i = 1; i < 50000; ++i) {
    const float logit = -static_cast<float>(i) * 1e-3f;
    const std::uint64_t mass = sampling::mass_of(logit, 0, sampling::log2_rate(1));
    EXPECT_LE(mass, before) << i;
    const double exact = std::exp(static_cast<double>(logit)) * 0x1p44;
    EXPECT_NEAR(static_cast<double>(mass), exact, 4e-6 * exact + 1) << i;
    before = mass;
  }
  EXPECT_EQ(sampling::mass_of(-std::numeric_limits<float>::infinity(), 0, 1), 0u);
  EXPECT_EQ(sampling::mass_of(std::numeric_limits<float>::quiet_NaN(), 0, 1), 0u);
}

}  // namespace
}  // namespace heddle::ops::testing
