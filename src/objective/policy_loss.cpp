#include "objective/policy_loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace heddle::objective {
namespace {

constexpr double kLargestLogRatio = 20, kLargestKl = 10;

/// A clamped number; has_gradient: it was within, so that its derivative is 1.
struct Clamped {
  double value;
  bool has_gradient;
};
Clamped clamp(double x, double limit) {
  return {std::clamp(x, -limit, limit), std::abs(x) <= limit};
}

/// exp of a clamped log-ratio, with its derivative by the log-ratio.
struct Ratio {
  explicit Ratio(double log_ratio) {
    const Clamped x = clamp(log_ratio, kLargestLogRatio);
    value = std::exp(x.value);
    derivative = x.has_gradient ? value : 0;
  }
  double value, derivative;
};

/// A function's value and its derivative by l.
struct Term {
  double value = 0, derivative = 0;
};

double k_of(int form, double log_rho) {
  switch (form) {
    case 1:
      return -log_rho;
    case 2:
      return log_rho * log_rho / 2;
    default:
      return std::exp(log_rho) - log_rho - 1;
  }
}

Term kl_term(KlForm form, double log_ratio) {
  const Clamped x = clamp(log_ratio, kLargestLogRatio);
  Term term;
  switch (form) {
    case KlForm::kK1:
      term = {x.value, 1};
      break;
    case KlForm::kK2:
      term = {x.value * x.value / 2, x.value};
      break;
    case KlForm::kK3:
      term = {std::exp(-x.value) + x.value - 1, 1 - std::exp(-x.value)};
      break;
    case KlForm::kK3Plus:
      term = {std::exp(-x.value) + x.value - 1, x.value};
      break;
  }
  const Clamped value = clamp(term.value, kLargestKl);
  return {value.value, value.has_gradient && x.has_gradient ? term.derivative : 0};
}

/// One sequence of the loss.
class SequenceLoss {
 public:
  SequenceLoss(const PolicyTokens& tokens, const PolicyOptions& options, std::size_t first,
               std::size_t last, PolicyLossResult& result)
      : t_(tokens), o_(options), result_(result) {
    for (std::size_t i = first; i < last; ++i) {
      if (t_.mask[i] != 0) chosen_.push_back(i);
    }
  }

  void add() {
    if (chosen_.empty()) return;
    weigh();
    const std::size_t kept = static_cast<std::size_t>(
        std::count(is_kept_.begin(), is_kept_.end(), static_cast<char>(true)));
    PolicyStatistics& all = result_.statistics;
    const std::size_t counted = o_.counts_rejected ? chosen_.size() : kept;
    all.tokens += static_cast<double>(counted);
    all.sequences += counted > 0;
    all.rejected += static_cast<double>(chosen_.size() - kept);
    all.masked += static_cast<double>(chosen_.size());
    const double share = share_of(counted);
    const Ratio of_sequence(mean([&](std::size_t i) { return t_.logprobs[i] - old(i); }));
    for (std::size_t k = 0; k < chosen_.size(); ++k) {
      const std::size_t i = chosen_[k];
      const Term kl = reference_kl(i);
      const Term policy = is_kept_[k] ? policy_term(i, of_sequence, weights_[k]) : Term{};
      count(i, of_sequence, weights_[k]);
      const double kl_share = is_kept_[k] ? o_.kl_coefficient : 0;
      result_.loss_sum += share * (policy.value + kl_share * kl.value);
      result_.d_logprobs[i] = share * (policy.derivative + kl_share * kl.derivative);
    }
  }

 private:
  double old(std::size_t i) const { return t_.old.empty() ? t_.logprobs[i] : t_.old[i]; }
  bool is_bypass() const { return t_.behaviour.empty(); }
  double behaviour(std::size_t i) const { return is_bypass() ? old(i) : t_.behaviour[i]; }
  double log_rho(std::size_t i) const {
    const double target = is_bypass() ? t_.logprobs[i] : old(i);
    return std::clamp(target - behaviour(i), -kLargestLogRatio, kLargestLogRatio);
  }
  /// Factor of a token's loss in a sequence that counts as so many.
  double share_of(std::size_t counted) const {
    if (o_.mean == LossMean::kSequenceToken)
      return 1 / static_cast<double>(std::max<std::size_t>(1, counted));
    return o_.mean == LossMean::kSequenceConstant ? 1 / o_.constant_length : 1;
  }
  template <class F>
  double sum(F&& of_token) const {
    double total = 0;
    for (const std::size_t i : chosen_) total += of_token(i);
    return total;
  }
  template <class F>
  double mean(F&& of_token) const {
    return sum(of_token) / static_cast<double>(chosen_.size());
  }
  double exp_clamped(double x) const { return Ratio(x).value; }

  bool is_within(double statistic) const {
    return statistic >= o_.rejection_low && statistic <= o_.rejection_high;
  }
  /// A statistic of the whole sequence; kOff and kToken have none.
  bool keeps_sequence() const {
    const double advantage = t_.advantages[chosen_.front()];
    if (o_.off_policy_delta > 0 && advantage < 0 &&
        mean([&](std::size_t i) { return behaviour(i) - t_.logprobs[i]; }) > o_.off_policy_delta)
      return false;
    const auto rho = [&](std::size_t i) { return log_rho(i); };
    switch (o_.rejection) {
      case Rejection::kOff:
      case Rejection::kToken:
        return true;
      case Rejection::kSequence:
        return is_within(exp_clamped(sum(rho)));
      case Rejection::kGeometric:
        return is_within(exp_clamped(mean(rho)));
      default:
        break;
    }
    const int place = static_cast<int>(o_.rejection) - static_cast<int>(Rejection::kSumK1);
    const auto k = [&](std::size_t i) { return k_of(place / 3 + 1, log_rho(i)); };
    if (place % 3 == 0) return is_within(sum(k));
    if (place % 3 == 1) return is_within(mean(k));
    double largest = -std::numeric_limits<double>::infinity();
    for (const std::size_t i : chosen_) largest = std::max(largest, k(i));
    return is_within(largest);
  }

  /// Fills weights_ and is_kept_.
  void weigh() {
    const bool keeps = keeps_sequence();
    const double of_sequence =
        o_.importance == ImportanceWeight::kSequence
            ? std::min(o_.importance_cap,
                       exp_clamped(sum([&](std::size_t i) { return log_rho(i); })))
            : 1;
    for (const std::size_t i : chosen_) {
      const double rho = std::exp(log_rho(i));
      is_kept_.push_back(keeps && (o_.rejection != Rejection::kToken || is_within(rho)));
      weights_.push_back(o_.importance == ImportanceWeight::kToken
                             ? std::min(o_.importance_cap, rho)
                             : of_sequence);
    }
  }

  double low(std::size_t i) const { return t_.clip_low.empty() ? 1 - o_.clip_low : t_.clip_low[i]; }
  double high(std::size_t i) const {
    return t_.clip_high.empty() ? 1 + o_.clip_high : t_.clip_high[i];
  }

  Term clipped(std::size_t i, const Ratio& r) const {
    const double A = t_.advantages[i], free = r.value * A,
                 bounded = std::clamp(r.value, low(i), high(i)) * A;
    Term term = free <= bounded ? Term{-free, -A * r.derivative} : Term{-bounded, 0};
    if (o_.dual_clip > 0 && A < 0 && term.value > -o_.dual_clip * A) term = {-o_.dual_clip * A, 0};
    return term;
  }

  /// Loss of the token before aggregation.
  Term policy_term(std::size_t i, const Ratio& of_sequence, double weight) const {
    const double A = t_.advantages[i], l = t_.logprobs[i];
    const Ratio r(l - old(i));
    const auto times_logprob = [&](double factor) { return Term{-factor * A * l, -factor * A}; };
    Term term;
    switch (o_.loss) {
      case PolicyLoss::kPpo:
        term = clipped(i, r);
        break;
      case PolicyLoss::kGspo:
        term = clipped(i, of_sequence);
        break;
      case PolicyLoss::kCispo:
        term = times_logprob(std::clamp(r.value, low(i), high(i)));
        break;
      case PolicyLoss::kSapo: {
        const double tau = A > 0 ? o_.sapo_tau_positive : o_.sapo_tau_negative;
        const double s = 1 / (1 + std::exp(-tau * (r.value - 1)));
        term = {-4 / tau * s * A, -4 * s * (1 - s) * A * r.derivative};
        break;
      }
      case PolicyLoss::kReinforce:
        return times_logprob(weight);
      case PolicyLoss::kDppo: {
        const double moved = std::exp(l) - std::exp(old(i));
        term = (A > 0 ? moved : -moved) <= o_.dppo_delta
                   ? times_logprob(std::min(r.value, o_.dppo_cap))
                   : Term{};
        break;
      }
      case PolicyLoss::kDro: {
        const Clamped x = clamp(l - old(i), kLargestLogRatio);
        term = {-(A * l - o_.dro_beta / 2 * x.value * x.value),
                -A + (x.has_gradient ? o_.dro_beta * x.value : 0)};
        break;
      }
    }
    if (is_bypass()) return term;
    return {weight * term.value, weight * term.derivative};
  }

  Term reference_kl(std::size_t i) const {
    if (t_.reference.empty()) return {};
    const Term kl = kl_term(o_.kl_form, t_.logprobs[i] - t_.reference[i]);
    if (!o_.kl_ratio_weighted) return kl;
    const Ratio r(t_.logprobs[i] - old(i));
    return {r.value * kl.value, r.value * kl.derivative + r.derivative * kl.value};
  }

  void count(std::size_t i, const Ratio& of_sequence, double weight) {
    PolicyStatistics& all = result_.statistics;
    const double log_ratio = t_.logprobs[i] - old(i);
    const double r = o_.loss == PolicyLoss::kGspo ? of_sequence.value : Ratio(log_ratio).value;
    all.ratio += r;
    all.ratio_max = std::max(all.ratio_max, r);
    all.clipped_low += r < low(i) && t_.advantages[i] < 0;
    all.clipped_high += r > high(i) && t_.advantages[i] > 0;
    all.old_kl -= log_ratio;
    if (!t_.reference.empty())
      all.reference_kl += kl_term(KlForm::kK3, t_.logprobs[i] - t_.reference[i]).value;
    const double rho = log_rho(i);
    all.mismatch_k1 -= rho;
    all.mismatch_k3 += std::exp(rho) - rho - 1;
    all.mismatch_abs += std::abs(rho);
    all.mismatch_abs_max = std::max(all.mismatch_abs_max, std::abs(rho));
    all.weight += weight;
    all.weight_squared += weight * weight;
  }

  const PolicyTokens& t_;
  const PolicyOptions& o_;
  PolicyLossResult& result_;
  std::vector<std::size_t> chosen_;  ///< Tokens of the mask.
  std::vector<double> weights_;      ///< For them.
  std::vector<char> is_kept_;
};

}  // namespace

void PolicyStatistics::add(const PolicyStatistics& other) {
  for (const auto sum : kPolicySums) this->*sum += other.*sum;
  ratio_max = std::max(ratio_max, other.ratio_max);
  mismatch_abs_max = std::max(mismatch_abs_max, other.mismatch_abs_max);
}

PolicyLossResult policy_loss(const PolicyTokens& tokens, const PolicyOptions& options) {
  PolicyLossResult result;
  result.d_logprobs.resize(tokens.logprobs.size());
  for (std::size_t s = 0; s + 1 < tokens.cu_seqlens.size(); ++s) {
    SequenceLoss(tokens, options, static_cast<std::size_t>(tokens.cu_seqlens[s]),
                 static_cast<std::size_t>(tokens.cu_seqlens[s + 1]), result)
        .add();
  }
  return result;
}

double divisor_of(LossMean mean, double tokens, double sequences) {
  switch (mean) {
    case LossMean::kToken:
      return tokens;
    case LossMean::kSequenceToken:
    case LossMean::kSequenceSum:
    case LossMean::kSequenceConstant:
      return sequences;
    case LossMean::kSum:
      return 1;
  }
  return 1;
}

}  // namespace heddle::objective
