// Losses of the Tinker API against their formulas in float64, and their derivatives.
#include "tenants/loss.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "testing/message_of.h"

namespace heddle::tenants {
namespace {

Work work_of(const std::string& loss_fn) {
  Work work;
  work.loss_fn = loss_fn;
  for (const int length : {3, 1, 8}) {
    Datum datum;
    for (int t = 0; t < length; ++t) {
      datum.tokens.push_back(t);
      datum.target_tokens.push_back(t);
      datum.inputs["logprobs"].push_back(-1.0F - 0.3F * static_cast<float>(t % 4));
      datum.inputs["advantages"].push_back(static_cast<float>((t * 5 + length) % 7) - 3);
    }
    work.data.push_back(datum);
  }
  return work;
}

std::vector<double> logprobs() {
  std::vector<double> values;
  for (int t = 0; t < 12; ++t) values.push_back(-0.4 - 0.35 * (t * 3 % 7));
  return values;
}

/// sum over tokens of f(l, q, A).
template <class F>
double sum(const Work& work, const std::vector<double>& l, F f) {
  double total = 0;
  std::size_t i = 0;
  for (const Datum& datum : work.data) {
    for (std::size_t t = 0; t < datum.tokens.size(); ++t, ++i)
      total +=
          f(l[i], double{datum.inputs.at("logprobs")[t]}, double{datum.inputs.at("advantages")[t]});
  }
  return total;
}

/// The derivative of the loss as the trainer uses it, against differences.
void expect_derivatives(const Work& work) {
  const std::vector<double> l = logprobs();
  const LossValues values = loss_of(work, work.data, l);
  for (std::size_t i = 0; i < l.size(); ++i) {
    constexpr double kStep = 1e-6;
    std::vector<double> up = l, down = l;
    up[i] += kStep;
    down[i] -= kStep;
    const double slope =
        (loss_of(work, work.data, up).sum - loss_of(work, work.data, down).sum) / (2 * kStep);
    EXPECT_NEAR(values.d_logprobs[i], slope, 1e-6) << work.loss_fn << " " << i;
  }
}

TEST(Loss, EqualsItsFormula) {
  const std::vector<double> l = logprobs();
  Work work = work_of("importance_sampling");
  check_loss(work);
  EXPECT_NEAR(loss_of(work, work.data, l).sum,
              sum(work, l, [](double l, double q, double A) { return -std::exp(l - q) * A; }),
              1e-12);
  expect_derivatives(work);
  work.loss_fn = "ppo";
  const auto ppo = [](double low, double high) {
    return [=](double l, double q, double A) {
      const double r = std::exp(l - q);
      return -std::min(r * A, std::clamp(r, low, high) * A);
    };
  };
  EXPECT_NEAR(loss_of(work, work.data, l).sum, sum(work, l, ppo(0.8, 1.2)), 1e-12);
  work.config = {{"clip_low_threshold", 0.5}, {"clip_high_threshold", 1.1}};
  EXPECT_NEAR(loss_of(work, work.data, l).sum, sum(work, l, ppo(0.5, 1.1)), 1e-12);
  expect_derivatives(work);
  work.loss_fn = "cispo";
  work.config.clear();
  EXPECT_NEAR(loss_of(work, work.data, l).sum,
              sum(work, l,
                  [](double l, double q, double A) {
                    return -std::clamp(std::exp(l - q), 0.0, 4.0) * A * l;
                  }),
              1e-12);
  work.loss_fn = "dro";
  EXPECT_EQ(testing::message_of([&] { check_loss(work); }),
            "loss_fn_config: loss_fn dro needs 'beta'");
  work.config = {{"beta", 0.05}};
  check_loss(work);
  EXPECT_NEAR(
      loss_of(work, work.data, l).sum,
      sum(work, l,
          [](double l, double q, double A) { return -(A * l - 0.5 * 0.05 * (l - q) * (l - q)); }),
      1e-12);
  expect_derivatives(work);
}

TEST(Loss, GspoTakesTheRatioOfTheMaskedSequence) {
  Work work = work_of("gspo");
  for (Datum& datum : work.data) datum.inputs["sequence_ratio_mask"].assign(datum.tokens.size(), 1);
  work.config = {{"clip_low_threshold", 0}, {"clip_high_threshold", 1e9}};
  check_loss(work);
  const std::vector<double> l = logprobs();
  double expected = 0;
  std::size_t first = 0;
  for (const Datum& datum : work.data) {
    double mean = 0, advantages = 0;
    for (std::size_t t = 0; t < datum.tokens.size(); ++t) {
      mean += (l[first + t] - datum.inputs.at("logprobs")[t]) /
              static_cast<double>(datum.tokens.size());
      advantages += datum.inputs.at("advantages")[t];
    }
    expected -= std::exp(mean) * advantages;
    first += datum.tokens.size();
  }
  EXPECT_NEAR(loss_of(work, work.data, l).sum, expected, 1e-9);
}

TEST(Loss, DerivativesOfCrossEntropyAreThereBeforeLogprobs) {
  Work work = work_of("cross_entropy");
  for (Datum& datum : work.data) datum.inputs.clear();
  work.data[2].inputs["weights"] = {0, 0.5F, 1, 2, 0, 0.25F, 1, 1};
  check_loss(work);
  for (const bool begins_later : {false, true}) {
    const auto data = std::span<const Datum>(work.data).subspan(begins_later ? 1 : 0);
    const std::vector<double> l = logprobs();
    const auto own = std::span(l).subspan(begins_later ? 3 : 0);
    EXPECT_EQ(constant_derivatives(work, data), loss_of(work, data, own).d_logprobs);
  }
  for (const char* other : {"importance_sampling", "ppo", "cispo", "gspo", "dro"}) {
    work.loss_fn = other;
    EXPECT_EQ(constant_derivatives(work, work.data), std::nullopt) << other;
  }
}

TEST(Loss, NumbersThatMakeNoLossAreNamed) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(),
                   kInfinity = std::numeric_limits<double>::infinity();
  const struct {
    const char* loss;
    std::map<std::string, double> config;
    const char* message;
  } cases[] = {
      {"cross_entropy", {{"beta", 1}}, "cross_entropy has no 'beta': expected none"},
      {"importance_sampling", {{"clip_low_threshold", 1}}, "has no 'clip_low_threshold'"},
      {"ppo",
       {{"clip_low", 0.8}},
       "'clip_low': expected clip_low_threshold or clip_high_threshold"},
      {"ppo", {{"clip_low_threshold", 1.3}}, "clip_low_threshold 1.3 and clip_high_threshold 1.2"},
      {"ppo", {{"clip_low_threshold", kNan}}, "'clip_low_threshold' is not a number"},
      {"ppo", {{"clip_low_threshold", -1}}, "expected 0 <= low <= high"},
      {"ppo", {{"clip_low_threshold", 0.2}, {"clip_high_threshold", 0.28}}, "not distances from 1"},
      {"gspo", {{"clip_high_threshold", 0.9}}, "expected 0 <= low <= high"},
      {"cispo", {{"clip_low_threshold", 5}}, "clip_low_threshold 5 and clip_high_threshold 4"},
      {"dro", {}, "loss_fn dro needs 'beta'"},
      {"dro", {{"beta", -0.1}}, "'beta' is -0.1: expected a finite number from 0 on"},
      {"dro", {{"beta", kInfinity}}, "'beta' is inf"},
  };
  for (const auto& [loss, config, message] : cases) {
    Work work = work_of(loss);
    work.config = config;
    EXPECT_THAT(testing::message_of([&] { check_loss(work); }), ::testing::HasSubstr(message));
  }
  Work work = work_of("ppo");
  work.config = {{"clip_high_threshold", kInfinity}};
  check_loss(work);
  Datum& datum = work.data[1];
  datum.inputs["clip_low_threshold"].assign(datum.tokens.size(), 0.5F);
  check_loss(work);
  datum.inputs["clip_low_threshold"].back() = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(testing::message_of([&] { check_loss(work); }),
              ::testing::HasSubstr(fmt::format("datum 1, target {}: loss_fn ppo has "
                                               "clip_low_threshold nan",
                                               datum.tokens.size() - 1)));
}

TEST(Loss, StableReinforceSaysWhatToUse) {
  EXPECT_NE(testing::message_of([] {
              check_loss(work_of("stable_reinforce"));
            }).find("loss_fn=importance_sampling"),
            std::string::npos);
}

}  // namespace
}  // namespace heddle::tenants
