#include "objective/policy_loss.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "objective/sequence_sums.h"

namespace heddle::objective {
namespace {

using Numbers = std::vector<double>;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Three sequences: of five tokens (one masked), of one token, and a fully masked one. Ratios lie
/// on both sides of every clip, and one log-ratio beyond its clamp.
struct Case {
  std::vector<std::int32_t> cu_seqlens = {0, 5, 6, 8};
  Numbers logprobs = {-1.2, -0.4, -2.5, -0.9, -23.0, -0.7, -1.0, -2.0};
  Numbers old = {-1.0, -0.9, -2.5, -1.4, -0.5, -0.65, -3.0, -1.0};
  Numbers behaviour = {-1.3, -0.2, -2.4, -1.1, -0.9, -1.9, -0.5, -0.5};
  Numbers reference = {-1.0, -1.4, -2.6, -0.1, -1.0, -0.2, -1.0, -1.0};
  Numbers ages = {3, 1, 0, 0, 2, 1, 0, 0};    ///< In versions.
  Numbers depths = {0, 0, 1, 2, 3, 0, 0, 1};  ///< In parts of the longest sequence.
  Numbers advantages = {0.8, 0.8, -1.1, 0.8, -0.6, -1.5, 2.0, 2.0};
  std::vector<float> mask = {1, 1, 1, 0, 1, 1, 0, 0};
  bool has_old = true, has_behaviour = true, has_reference = true;

  /// Places of the tokens that the policy chose.
  std::vector<std::int64_t> chosen() const {
    std::vector<std::int64_t> places;
    for (std::size_t i = 0; i < mask.size(); ++i)
      if (mask[i] != 0) places.push_back(static_cast<std::int64_t>(i));
    return places;
  }
  at::Tensor column(const Numbers& all) const {
    Numbers values;
    for (const std::int64_t place : chosen())
      values.push_back(all[static_cast<std::size_t>(place)]);
    return at::tensor(values, at::kDouble);
  }
  PolicyTokens tokens() const {
    PolicyTokens t;
    if (has_old) t.old = column(old);
    if (has_behaviour) t.behaviour = column(behaviour);
    if (has_reference) t.reference = column(reference);
    t.age = column(ages);
    t.depth = column(depths);
    t.advantages = column(advantages);
    t.sequence_tokens = at::tensor(Numbers{4, 4, 4, 4, 1}, at::kDouble);
    t.first_advantage = at::tensor(Numbers{0.8, 0.8, 0.8, 0.8, -1.5}, at::kDouble);
    return t;
  }
};

/// The loss of the case's tokens.
struct Found {
  double loss_sum;
  Numbers d_logprobs;  ///< All tokens have one, chosen or not.
  PolicyStatistics statistics;
};
Found loss_of(const Case& c, const PolicyTokens& tokens, const PolicyOptions& options) {
  const SequenceSums sequences(comm::Group("test"), at::tensor({0, 0, 0, 0, 1}, at::kLong),
                               at::ones({5}, at::kDouble), 3);
  const PolicyLossResult result = policy_loss(c.column(c.logprobs), tokens, options,
                                              options.is_by_token() ? nullptr : &sequences);
  Found found{result.sums.loss.item<double>(), Numbers(c.logprobs.size()), {}};
  const std::vector<std::int64_t> places = c.chosen();
  for (std::size_t i = 0; i < places.size(); ++i) {
    found.d_logprobs[static_cast<std::size_t>(places[i])] =
        result.d_logprobs.const_data_ptr<double>()[i];
  }
  const std::vector<double*> sums = sums_of(found.statistics);
  for (std::int64_t i = 0; i < result.sums.sums.numel(); ++i)
    *sums[static_cast<std::size_t>(i)] = result.sums.sums.const_data_ptr<double>()[i];
  found.statistics.ratio_max = result.sums.largest.const_data_ptr<double>()[0];
  found.statistics.mismatch_abs_max = result.sums.largest.const_data_ptr<double>()[1];
  return found;
}
Found loss_of(const Case& c, const PolicyOptions& options) {
  return loss_of(c, c.tokens(), options);
}

/// The tables of formulas, token by token, from log-probabilities `l` whose gradient is wanted and
/// `sg`, equal numbers whose gradient is not. Written apart from the code: with quotients of
/// probabilities in place of differences of logarithms, and in the order of the definitions.
class Formula {
 public:
  Formula(const Case& c, const PolicyOptions& o, const Numbers& l) : c_(c), o_(o), l_(l) {}

  double loss() const {
    double total = 0;
    for (std::size_t s = 0; s + 1 < c_.cu_seqlens.size(); ++s) total += sequence(s);
    return total;
  }

 private:
  std::vector<std::size_t> chosen(std::size_t s) const {
    std::vector<std::size_t> found;
    for (auto i = static_cast<std::size_t>(c_.cu_seqlens[s]);
         i < static_cast<std::size_t>(c_.cu_seqlens[s + 1]); ++i)
      if (c_.mask[i] == 1) found.push_back(i);
    return found;
  }
  static double exp20(double x) { return std::exp(std::max(-20.0, std::min(20.0, x))); }
  double sg(std::size_t i) const { return c_.logprobs[i]; }
  double old(std::size_t i) const {
    if (c_.has_old) return c_.old[i];
    if (!o_.interpolates_old) return sg(i);
    // Tokens of version v, weights in training of version 9: the one before them has 8.
    const double v = 9 - c_.ages[i];
    const double alpha = v < 9 ? std::max(0.0, std::min(1.0, (8 - v) / (9 - v))) : 0;
    return (1 - alpha) * c_.behaviour[i] + alpha * sg(i);
  }
  double behaviour(std::size_t i) const { return c_.has_behaviour ? c_.behaviour[i] : old(i); }
  double rho(std::size_t i) const {
    return c_.has_behaviour ? exp20(old(i) - c_.behaviour[i]) : exp20(sg(i) - old(i));
  }

  bool keeps(const std::vector<std::size_t>& y) const {
    const auto n = static_cast<double>(y.size());
    double gap = 0;
    Numbers k1, k2, k3;
    for (const std::size_t i : y) {
      gap += (behaviour(i) - sg(i)) / n;
      const double x = std::log(rho(i));
      k1.push_back(-x), k2.push_back(x * x / 2), k3.push_back(rho(i) - x - 1);
    }
    if (o_.off_policy_delta > 0 && c_.advantages[y[0]] < 0 && gap > o_.off_policy_delta)
      return false;
    const auto holds = [&](double x) { return o_.rejection_low <= x && x <= o_.rejection_high; };
    const auto total = [](const Numbers& k) { return std::accumulate(k.begin(), k.end(), 0.0); };
    const auto largest = [](const Numbers& k) { return *std::max_element(k.begin(), k.end()); };
    switch (o_.rejection) {
      case Rejection::kOff:
      case Rejection::kToken:
        return true;
      case Rejection::kSequence:
        return holds(product_of_rho(y));
      case Rejection::kGeometric:
        return holds(exp20(-total(k1) / n));
      case Rejection::kSumK1:
        return holds(total(k1));
      case Rejection::kMeanK1:
        return holds(total(k1) / n);
      case Rejection::kMaxK1:
        return holds(largest(k1));
      case Rejection::kSumK2:
        return holds(total(k2));
      case Rejection::kMeanK2:
        return holds(total(k2) / n);
      case Rejection::kMaxK2:
        return holds(largest(k2));
      case Rejection::kSumK3:
        return holds(total(k3));
      case Rejection::kMeanK3:
        return holds(total(k3) / n);
      case Rejection::kMaxK3:
        return holds(largest(k3));
    }
    return true;
  }

  double product_of_rho(const std::vector<std::size_t>& y) const {
    double logarithm = 0;
    for (const std::size_t i : y) logarithm += std::log(rho(i));
    return exp20(logarithm);
  }
  double clip(double r) const { return std::max(1 - o_.clip_low, std::min(1 + o_.clip_high, r)); }
  double ppo(double r, double A) const {
    const double loss = -std::min(r * A, clip(r) * A);
    return o_.dual_clip > 0 && A < 0 ? std::min(loss, -o_.dual_clip * A) : loss;
  }

  double policy(std::size_t i, double sequence_ratio, double w) const {
    const double A = c_.advantages[i], r = exp20(l_[i] - old(i)), r_sg = exp20(sg(i) - old(i));
    const double outer = c_.has_behaviour ? w : 1;
    switch (o_.loss) {
      case PolicyLoss::kPpo:
        return outer * ppo(r, A);
      case PolicyLoss::kGspo:
        // s_t = sg(s) pi / sg(pi)
        return outer * ppo(sequence_ratio * std::exp(l_[i] - sg(i)), A);
      case PolicyLoss::kCispo:
        return outer * -clip(r_sg) * A * l_[i];
      case PolicyLoss::kSapo: {
        const double tau = A > 0 ? o_.sapo_tau_positive : o_.sapo_tau_negative;
        return outer * -4 / tau / (1 + std::exp(-tau * (r - 1))) * A;
      }
      case PolicyLoss::kReinforce:
        return -w * A * l_[i];
      case PolicyLoss::kDppo: {
        const double move = std::exp(sg(i)) - std::exp(old(i));
        const bool stays = A > 0 ? move <= o_.dppo_delta : -move <= o_.dppo_delta;
        return stays ? outer * -std::min(r_sg, o_.dppo_cap) * A * l_[i] : 0;
      }
      case PolicyLoss::kDro: {
        const double x = std::log(r);
        return outer * -(A * l_[i] - o_.dro_beta * x * x / 2);
      }
    }
    return 0;
  }

  double kl(std::size_t i) const {
    if (!c_.has_reference) return 0;
    const auto k3 = [](double x) { return std::exp(-x) + x - 1; };
    const auto within = [](double x) { return std::max(-20.0, std::min(20.0, x)); };
    const double x = within(l_[i] - c_.reference[i]), frozen = within(sg(i) - c_.reference[i]);
    double value = o_.kl_form == KlForm::kK1   ? x
                   : o_.kl_form == KlForm::kK2 ? x * x / 2
                   : o_.kl_form == KlForm::kK3 ? k3(x)
                                               : k3(frozen) + x * x / 2 - frozen * frozen / 2;
    value = k3(frozen) > 10 && o_.kl_form == KlForm::kK3Plus
                ? 10
                : std::max(-10.0, std::min(10.0, value));
    return o_.kl_ratio_weighted ? exp20(l_[i] - old(i)) * value : value;
  }

  double sequence(std::size_t s) const {
    const std::vector<std::size_t> y = chosen(s);
    if (y.empty() || !keeps(y)) return 0;
    double mean_log_ratio = 0, total = 0, counted = 0;
    for (const std::size_t i : y)
      mean_log_ratio += (sg(i) - old(i)) / static_cast<double>(y.size());
    for (const std::size_t i : y) {
      const bool is_kept = o_.rejection != Rejection::kToken ||
                           (o_.rejection_low <= rho(i) && rho(i) <= o_.rejection_high);
      ++counted;
      const double cap =
          o_.importance_cap > 0 ? o_.importance_cap : std::numeric_limits<double>::infinity();
      const double w = o_.importance == ImportanceWeight::kOff ? 1
                       : o_.importance == ImportanceWeight::kToken
                           ? std::min(rho(i), cap)
                           : std::min(product_of_rho(y), cap);
      if (is_kept) total += policy(i, exp20(mean_log_ratio), w) + o_.kl_coefficient * kl(i);
    }
    if (o_.mean == LossMean::kSequenceToken) total /= std::max(1.0, counted);
    if (o_.mean == LossMean::kSequenceConstant) total /= o_.constant_length;
    return total;
  }

  const Case& c_;
  const PolicyOptions& o_;
  const Numbers& l_;
};

void expect_formula(const Case& c, const PolicyOptions& options, const std::string& what) {
  const Found result = loss_of(c, options);
  const double expected = Formula(c, options, c.logprobs).loss();
  EXPECT_NEAR(result.loss_sum, expected, 1e-10 * (1 + std::abs(expected))) << what;
  for (std::size_t i = 0; i < c.logprobs.size(); ++i) {
    Numbers up = c.logprobs, down = c.logprobs;
    up[i] += 1e-6, down[i] -= 1e-6;
    const double slope = (Formula(c, options, up).loss() - Formula(c, options, down).loss()) / 2e-6;
    EXPECT_NEAR(result.d_logprobs[i], slope, 1e-7 * (1 + std::abs(slope)))
        << what << ", token " << i;
  }
}

std::vector<Case> cases() {
  std::vector<Case> all(5);
  all[1].has_behaviour = false;
  all[2].has_old = false;
  all[3].has_old = all[3].has_behaviour = all[3].has_reference = false;
  std::fill(all[4].advantages.begin(), all[4].advantages.end(), 0.0);  // zero variance
  return all;
}

const PolicyLoss kLosses[] = {PolicyLoss::kPpo,  PolicyLoss::kGspo,      PolicyLoss::kCispo,
                              PolicyLoss::kSapo, PolicyLoss::kReinforce, PolicyLoss::kDppo,
                              PolicyLoss::kDro};

TEST(PolicyLoss, EqualsTheFormulasAndTheirSlopes) {
  for (const Case& c : cases()) {
    for (const PolicyLoss loss : kLosses) {
      for (int mean = 0; mean < 5; ++mean) {
        PolicyOptions options;
        options.loss = loss;
        options.mean = static_cast<LossMean>(mean);
        options.clip_high = 0.28;
        options.constant_length = 7;
        expect_formula(c, options, "loss " + std::to_string(static_cast<int>(loss)));
        options.clip_low = options.clip_high = kInfinity;
        if (loss != PolicyLoss::kCispo) expect_formula(c, options, "not clipped");
        options.clip_low = 1, options.clip_high = 3, options.dual_clip = 1.5;
        expect_formula(c, options, "dual clip");
      }
    }
  }
}

TEST(PolicyLoss, OldPolicyLiesBetweenThoseThatDrewAndThatLearns) {
  Case c;
  c.has_old = false;
  for (const PolicyLoss loss : kLosses) {
    for (int importance = 0; importance < 3; ++importance) {
      PolicyOptions options;
      options.loss = loss;
      options.interpolates_old = true;
      options.importance = static_cast<ImportanceWeight>(importance);
      options.rejection = Rejection::kMeanK3;
      options.rejection_low = 0, options.rejection_high = 1.3;
      expect_formula(c, options, "interpolated, loss " + std::to_string(static_cast<int>(loss)));
    }
  }
  // Tokens of the weights in training and of those before them have the policy that drew them.
  const at::Tensor alpha = interpolation(at::tensor(Numbers{0, 1, 2, 3, 4}, at::kDouble));
  EXPECT_TRUE(at::allclose(alpha, at::tensor(Numbers{0, 0, 0.5, 2.0 / 3, 0.75}, at::kDouble)));
  // The mismatch is that of the policy that learns.
  PolicyOptions options;
  options.interpolates_old = true;
  double k1 = 0;
  for (const std::int64_t i : c.chosen()) {
    const auto place = static_cast<std::size_t>(i);
    k1 -= std::max(-20.0, std::min(20.0, c.logprobs[place] - c.behaviour[place]));
  }
  EXPECT_NEAR(loss_of(c, options).statistics.mismatch_k1, k1, 1e-12);
}

TEST(PolicyLoss, EqualsTheFormsOfTheKl) {
  for (Case c : cases()) {
    for (int form = 0; form < 4; ++form) {
      for (const bool weighted : {false, true}) {
        PolicyOptions options;
        options.kl_coefficient = 0.3;
        options.kl_form = static_cast<KlForm>(form);
        options.kl_ratio_weighted = weighted;
        expect_formula(c, options, "kl " + std::to_string(form));
      }
    }
  }
}

TEST(PolicyLoss, EqualsTheCorrections) {
  for (const Case& c : cases()) {
    for (const PolicyLoss loss : kLosses) {
      for (int importance = 0; importance < 3; ++importance) {
        for (int rejection = 0; rejection < 13; ++rejection) {
          PolicyOptions options;
          options.importance_cap = rejection % 2 == 0 ? 2 : 0;
          options.loss = loss;
          options.mean = LossMean::kSequenceToken;
          options.importance = static_cast<ImportanceWeight>(importance);
          options.rejection = static_cast<Rejection>(rejection);
          options.rejection_low = -0.2, options.rejection_high = 1.3;
          expect_formula(c, options, "rejection " + std::to_string(rejection));
        }
      }
      PolicyOptions options;
      options.loss = loss;
      options.off_policy_delta = 0.5;
      expect_formula(c, options, "off-policy mask");
    }
  }
}

TEST(PolicyLoss, RejectedTokensStayInTheDivisor) {
  const Case c;
  // The second sequence, of one token with rho = exp(1.25), is dropped.
  PolicyOptions options;
  options.rejection = Rejection::kSequence;
  options.rejection_low = 0, options.rejection_high = 2;
  const PolicyStatistics all = loss_of(c, options).statistics;
  EXPECT_EQ(all.tokens, 5);
  EXPECT_EQ(all.rejected, 1);
  EXPECT_EQ(divisor_of(LossMean::kToken, 5, 2), 5);
  EXPECT_EQ(divisor_of(LossMean::kSequenceSum, 5, 2), 2);
  EXPECT_EQ(divisor_of(LossMean::kSum, 5, 2), 1);
}

TEST(PolicyLoss, OnPolicyRatioIsExactlyOne) {
  Case c;
  c.has_old = c.has_behaviour = false;
  const PolicyStatistics all = loss_of(c, {}).statistics;
  EXPECT_EQ(all.ratio, 5);
  EXPECT_EQ(all.ratio_max, 1);
  EXPECT_EQ(all.old_kl, 0);
  EXPECT_EQ(all.mismatch_abs, 0);
}

TEST(PolicyLoss, MismatchIsToldByAgeAndByDepth) {
  const Case c;
  const auto expect = [&](const MismatchSums& found, const std::vector<std::size_t>& places) {
    double k1 = 0, k3 = 0;
    for (const std::size_t i : places) {
      const double rho = std::exp(c.old[i] - c.behaviour[i]);
      k1 += c.behaviour[i] - c.old[i];
      k3 += rho - std::log(rho) - 1;
    }
    EXPECT_EQ(found.tokens, static_cast<double>(places.size()));
    EXPECT_NEAR(found.k1, k1, 1e-12);
    EXPECT_NEAR(found.k3, k3, 1e-12);
  };
  const PolicyStatistics all = loss_of(c, {}).statistics;
  expect(all.by_age[0], {2});
  expect(all.by_age[1], {1, 5});
  expect(all.by_age[2], {0, 4});
  // The only token of depth 2 is masked.
  expect(all.by_depth[0], {0, 1, 5});
  expect(all.by_depth[1], {2});
  expect(all.by_depth[2], {});
  expect(all.by_depth[3], {4});
  PolicyTokens unknown = c.tokens();
  unknown.age = unknown.depth = at::Tensor();
  const PolicyStatistics none = loss_of(c, unknown, {}).statistics;
  for (const MismatchSums& part : none.by_age) EXPECT_EQ(part.tokens, 0);
  for (const MismatchSums& part : none.by_depth) EXPECT_EQ(part.tokens, 0);
}

TEST(PolicyLoss, MismatchAndWeightsAreSummedUp) {
  const Case c;
  PolicyOptions options;
  options.importance = ImportanceWeight::kToken;
  options.importance_cap = 1.3;
  double squared = 0, factor = 0, capped = 0;
  for (const std::int64_t i : c.chosen()) {
    const auto place = static_cast<std::size_t>(i);
    const double rho = std::exp(c.old[place]) / std::exp(c.behaviour[place]);
    squared += rho * rho, factor += std::max(rho, 1 / rho), capped += rho >= 1.3;
  }
  PolicyTokens tokens = c.tokens();
  for (const double mean : {1.0, 0.7}) {
    tokens.mean_weight = mean;
    const PolicyStatistics all = loss_of(c, tokens, options).statistics;
    EXPECT_NEAR(all.mismatch_squared, squared, 1e-12);
    EXPECT_NEAR(all.mismatch_factor, factor, 1e-12);
    EXPECT_EQ(all.weight_capped, capped);
  }
  EXPECT_GT(capped, 0);
  EXPECT_LT(capped, 5);
  options.importance_cap = 0;
  EXPECT_EQ(loss_of(c, options).statistics.weight_capped, 0);
}

TEST(PolicyLoss, ClipsOfTokensReplaceThoseOfTheOptions) {
  const Case c;
  PolicyTokens tokens = c.tokens();
  tokens.clip_low = at::full({5}, 0.7, at::kDouble);
  tokens.clip_high = at::full({5}, 1.1, at::kDouble);
  PolicyOptions options;
  options.clip_low = 0.3, options.clip_high = 0.1;
  EXPECT_NEAR(loss_of(c, tokens, {}).loss_sum, loss_of(c, options).loss_sum, 1e-12);
}

// The head gives tokens chunk by chunk.
TEST(PolicyLoss, PiecesOfTokensAddUp) {
  const Case c;
  const PolicyTokens tokens = c.tokens();
  const at::Tensor logprobs = c.column(c.logprobs);
  for (const PolicyLoss loss : kLosses) {
    PolicyOptions options;
    options.loss = loss;
    options.mean = LossMean::kSequenceToken;
    options.rejection = Rejection::kToken;
    options.rejection_low = 0.1, options.rejection_high = 1.3;
    options.kl_coefficient = 0.2;
    if (!options.is_by_token()) continue;
    const PolicyLossResult whole = policy_loss(logprobs, tokens, options, nullptr);
    PolicySums sums;
    for (const auto& [first, count] : {std::pair{0, 2}, {2, 1}, {3, 2}}) {
      const PolicyLossResult part = policy_loss(logprobs.narrow(0, first, count),
                                                tokens.narrow(first, count), options, nullptr);
      sums.add(part.sums);
      EXPECT_TRUE(at::equal(part.d_logprobs, whole.d_logprobs.narrow(0, first, count)));
    }
    EXPECT_NEAR(sums.loss.item<double>(), whole.sums.loss.item<double>(), 1e-12);
    EXPECT_TRUE(at::allclose(sums.sums, whole.sums.sums, 1e-12, 1e-12));
    EXPECT_TRUE(at::equal(sums.largest, whole.sums.largest));
  }
}

TEST(PolicyLoss, LossesOfSequencesAreKnown) {
  EXPECT_TRUE(PolicyOptions{}.is_by_token());
  EXPECT_TRUE((PolicyOptions{.rejection = Rejection::kToken}.is_by_token()));
  EXPECT_FALSE((PolicyOptions{.loss = PolicyLoss::kGspo}.is_by_token()));
  EXPECT_FALSE((PolicyOptions{.importance = ImportanceWeight::kSequence}.is_by_token()));
  EXPECT_FALSE((PolicyOptions{.rejection = Rejection::kMaxK3}.is_by_token()));
  EXPECT_FALSE((PolicyOptions{.off_policy_delta = 0.1}.is_by_token()));
}

}  // namespace
}  // namespace heddle::objective
