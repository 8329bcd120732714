// The corrections that papers and other programs have names for, by the options that docs/rl.md
// gives for each.
#include "objective/correction.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "objective/policy_loss.h"
#include "objective/sequence_sums.h"

namespace heddle::objective {
namespace {

using Numbers = std::vector<double>;

/// Two sequences, of four tokens and of two; ratios of old and behaviour on both sides of 1.
const Numbers kLogprobs = {-1.1, -0.5, -2.4, -1.0, -0.7, -1.3};
const Numbers kOld = {-1.0, -0.9, -2.5, -1.4, -0.65, -1.2};
const Numbers kBehaviour = {-2.3, -0.2, -2.45, -1.1, -0.6, -2.5};
const std::vector<std::int64_t> kSequence = {0, 0, 0, 0, 1, 1};

double rho(std::size_t i) { return std::exp(kOld[i]) / std::exp(kBehaviour[i]); }
/// Number of all tokens of the sequence that token i is of.
double over_sequence(std::size_t i, double start,
                     const std::function<double(double, double)>& join) {
  double value = start;
  for (std::size_t t = 0; t < kSequence.size(); ++t)
    if (kSequence[t] == kSequence[i]) value = join(value, rho(t));
  return value;
}
double product(std::size_t i) { return over_sequence(i, 1, std::multiplies<>()); }
double length(std::size_t i) {
  return over_sequence(i, 0, [](double n, double) { return n + 1; });
}
double geometric(std::size_t i) { return std::pow(product(i), 1 / length(i)); }
double mean_k3(std::size_t i) {
  return over_sequence(i, 0, [](double s, double r) { return s + r - std::log(r) - 1; }) /
         length(i);
}

/// Gradients by the log-probabilities.
Numbers gradients(const PolicyOptions& options, double mean_weight = 1) {
  PolicyTokens tokens;
  tokens.old = at::tensor(kOld, at::kDouble);
  tokens.behaviour = at::tensor(kBehaviour, at::kDouble);
  tokens.advantages = at::tensor(Numbers{1, 1, -1, 1, -2, -2}, at::kDouble);
  tokens.sequence_tokens = at::tensor(Numbers{4, 4, 4, 4, 2, 2}, at::kDouble);
  tokens.first_advantage = tokens.advantages;
  tokens.mean_weight = mean_weight;
  const SequenceSums sequences(comm::Group("test"), at::tensor(kSequence, at::kLong),
                               at::ones({6}, at::kDouble), 2);
  const at::Tensor found =
      policy_loss(at::tensor(kLogprobs, at::kDouble), tokens, options, &sequences).d_logprobs;
  return {found.const_data_ptr<double>(), found.const_data_ptr<double>() + 6};
}

TEST(Correction, NamesOfOthersAreOptions) {
  using Is = ImportanceWeight;
  const auto if_within = [](double value, double low, double high) {
    return low <= value && value <= high ? 1.0 : 0.0;
  };
  const struct {
    const char* name;
    PolicyOptions options;
    std::function<double(std::size_t)> factor;
  } methods[] = {
      {"token TIS",
       {.importance = Is::kToken, .importance_cap = 2},
       [](std::size_t i) { return std::min(rho(i), 2.0); }},
      {"sequence TIS",
       {.importance = Is::kSequence, .importance_cap = 1.5},
       [](std::size_t i) { return std::min(product(i), 1.5); }},
      {"MIS, IcePop",
       {.importance = Is::kToken,
        .importance_cap = 0,
        .rejection = Rejection::kToken,
        .rejection_low = 0.6,
        .rejection_high = 3},
       [&](std::size_t i) { return rho(i) * if_within(rho(i), 0.6, 3); }},
      {"Seq-MIS",
       {.importance = Is::kSequence,
        .importance_cap = 0,
        .rejection = Rejection::kSequence,
        .rejection_low = 0,
        .rejection_high = 3},
       [&](std::size_t i) { return product(i) * if_within(product(i), 0, 3); }},
      {"seq-mask-TIS",
       {.importance = Is::kToken,
        .importance_cap = 0,
        .rejection = Rejection::kGeometric,
        .rejection_low = 0.9,
        .rejection_high = 1.1},
       [&](std::size_t i) { return rho(i) * if_within(geometric(i), 0.9, 1.1); }},
      {"rejection by mean K3",
       {.importance = Is::kOff,
        .rejection = Rejection::kMeanK3,
        .rejection_low = 0,
        .rejection_high = 0.5},
       [&](std::size_t i) { return if_within(mean_k3(i), 0, 0.5); }},
  };
  for (const auto& [name, options, factor] : methods) {
    PolicyOptions plain;
    plain.loss = PolicyLoss::kSapo;  // no token of it is clipped
    PolicyOptions corrected = options;
    corrected.loss = plain.loss;
    const Numbers before = gradients(plain), after = gradients(corrected);
    bool leaves_some = false, changes = false;
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_NEAR(after[i], before[i] * factor(i), 1e-12) << name << ", token " << i;
      leaves_some = leaves_some || factor(i) != 0;
      changes = changes || factor(i) != 1;
    }
    EXPECT_TRUE(leaves_some && changes) << name;
  }
}

TEST(Correction, WeightsAreDividedByTheirMean) {
  const PolicyOptions options{.importance = ImportanceWeight::kToken, .importance_cap = 2};
  const Numbers whole = gradients(options), divided = gradients(options, 1.25);
  for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(divided[i], whole[i] / 1.25, 1e-12);
}

}  // namespace
}  // namespace heddle::objective
