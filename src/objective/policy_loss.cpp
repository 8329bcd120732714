#include "objective/policy_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "objective/correction.h"
#include "objective/sequence_sums.h"

namespace heddle::objective {
namespace {

constexpr double kLargestKl = 10;

/// A derivative, 0 where clamp() cut `x`.
at::Tensor if_within(const at::Tensor& derivative, const at::Tensor& x, double limit) {
  return derivative.masked_fill(x.abs() > limit, 0);
}

/// exp of a clamped log-ratio, with its derivative by the log-ratio.
struct Ratio {
  explicit Ratio(const at::Tensor& log_ratio)
      : value(at::exp(clamp(log_ratio, kLargestLogRatio))),
        derivative(if_within(value, log_ratio, kLargestLogRatio)) {}
  at::Tensor value, derivative;
};

/// A function's values and their derivatives by l.
struct Term {
  at::Tensor value, derivative;

  Term masked(const at::Tensor& is_left_out) const {
    return {value.masked_fill(is_left_out, 0), derivative.masked_fill(is_left_out, 0)};
  }
  template <class Factor>
  Term operator*(const Factor& factor) const {
    return {value * factor, derivative * factor};
  }
};

Term kl_term(KlForm form, const at::Tensor& log_ratio) {
  const at::Tensor x = clamp(log_ratio, kLargestLogRatio), inverse = at::exp(-x);
  Term term{inverse + x - 1, x};
  switch (form) {
    case KlForm::kK1:
      term = {x, at::ones_like(x)};
      break;
    case KlForm::kK2:
      term.value = x * x / 2;
      break;
    case KlForm::kK3:
      term.derivative = 1 - inverse;
      break;
    case KlForm::kK3Plus:
      break;
  }
  return {
      clamp(term.value, kLargestKl),
      if_within(if_within(term.derivative, log_ratio, kLargestLogRatio), term.value, kLargestKl)};
}

at::Tensor old_of(const at::Tensor& logprobs, const PolicyTokens& tokens,
                  const PolicyOptions& options) {
  if (tokens.old.defined()) return tokens.old;
  if (!options.interpolates_old) return logprobs;
  return tokens.behaviour + interpolation(tokens.age) * (logprobs - tokens.behaviour);
}

class Losses {
 public:
  Losses(const at::Tensor& logprobs, const PolicyTokens& tokens, const PolicyOptions& options,
         const SequenceSums* sequences)
      : t_(tokens),
        o_(options),
        sequences_(sequences),
        l_(logprobs),
        old_(old_of(logprobs, tokens, options)),
        is_bypass_(!tokens.behaviour.defined()),
        behaviour_(is_bypass_ ? old_ : tokens.behaviour),
        log_ratio_(l_ - old_),
        ratio_(log_ratio_),
        log_rho_(clamp((is_bypass_ ? l_ : old_) - behaviour_, kLargestLogRatio)),
        log_mismatch_(options.interpolates_old ? clamp(l_ - behaviour_, kLargestLogRatio)
                                               : log_rho_),
        low_(of_token(tokens.clip_low, 1 - options.clip_low)),
        high_(of_token(tokens.clip_high, 1 + options.clip_high)) {
    if (o_.loss == PolicyLoss::kGspo) ratio_ = Ratio(mean(log_ratio_));
  }

  PolicyLossResult result() const {
    const at::Tensor weights = this->weights(), is_rejected = this->is_rejected();
    Term term = policy_term(weights);
    if (t_.reference.defined()) {
      const Term kl = reference_kl();
      term = {term.value + o_.kl_coefficient * kl.value,
              term.derivative + o_.kl_coefficient * kl.derivative};
    }
    term = term.masked(is_rejected);
    if (o_.mean == LossMean::kSequenceToken || o_.mean == LossMean::kSequenceConstant)
      term = term * mean_factors(t_, o_);
    return {{term.value.sum(), sums(weights, is_rejected), largest()}, term.derivative};
  }

 private:
  at::Tensor of_token(const at::Tensor& column, double value) const {
    return column.defined() ? column : at::full_like(l_, value);
  }
  at::Tensor sum(const at::Tensor& values) const {
    return sequences_->at_tokens(sequences_->of(values));
  }
  at::Tensor mean(const at::Tensor& values) const { return sum(values) / t_.sequence_tokens; }

  at::Tensor is_rejected() const {
    at::Tensor is_rejected = objective::is_rejected(log_rho_, t_.sequence_tokens, o_, sequences_);
    if (o_.off_policy_delta > 0) {
      const at::Tensor distance = mean(behaviour_ - l_);
      is_rejected = is_rejected | ((t_.first_advantage < 0) & (distance > o_.off_policy_delta));
    }
    return is_rejected;
  }
  at::Tensor weights() const {
    return importance_weights(log_rho_, o_, sequences_) / t_.mean_weight;
  }

  /// 1 for each weight that is the cap, else 0.
  at::Tensor is_capped(const at::Tensor& weights) const {
    if (o_.importance == ImportanceWeight::kOff || o_.importance_cap == 0)
      return at::zeros_like(weights);
    // The mean that they were divided by may have rounded them.
    const double least = o_.importance_cap / t_.mean_weight * (1 - 1e-6);
    return (weights >= least).to(weights.scalar_type());
  }

  at::Tensor clipped_ratio() const { return at::minimum(at::maximum(ratio_.value, low_), high_); }
  Term clipped() const {
    const at::Tensor& A = t_.advantages;
    const at::Tensor free = ratio_.value * A, bounded = clipped_ratio() * A;
    const at::Tensor is_clipped = free > bounded;
    Term term{-at::where(is_clipped, bounded, free),
              -(A * ratio_.derivative).masked_fill(is_clipped, 0)};
    if (o_.dual_clip > 0) {
      const at::Tensor bound = -o_.dual_clip * A;
      const at::Tensor is_above = (A < 0) & (term.value > bound);
      term = {at::where(is_above, bound, term.value), term.derivative.masked_fill(is_above, 0)};
    }
    return term;
  }
  /// -sg(factor) A l
  Term times_logprob(const at::Tensor& factor) const {
    const at::Tensor derivative = -factor * t_.advantages;
    return {derivative * l_, derivative};
  }
  /// Losses of the tokens before aggregation.
  Term policy_term(const at::Tensor& weights) const {
    if (o_.loss == PolicyLoss::kReinforce) return times_logprob(weights);
    const Term term = unweighted_term();
    return is_bypass_ ? term : term * weights;
  }
  Term unweighted_term() const {
    const at::Tensor& A = t_.advantages;
    switch (o_.loss) {
      case PolicyLoss::kPpo:
      case PolicyLoss::kGspo:
        break;
      case PolicyLoss::kCispo:
        return times_logprob(clipped_ratio());
      case PolicyLoss::kSapo: {
        const at::Tensor tau =
            at::full_like(A, o_.sapo_tau_negative).masked_fill(A > 0, o_.sapo_tau_positive);
        const at::Tensor s = at::sigmoid(tau * (ratio_.value - 1));
        return {-4 / tau * s * A, -4 * s * (1 - s) * A * ratio_.derivative};
      }
      case PolicyLoss::kReinforce:
        break;
      case PolicyLoss::kDppo: {
        const at::Tensor moved = at::exp(l_) - at::exp(old_);
        return times_logprob(ratio_.value.clamp_max(o_.dppo_cap))
            .masked(at::where(A > 0, moved, -moved) > o_.dppo_delta);
      }
      case PolicyLoss::kDro: {
        const at::Tensor x = clamp(log_ratio_, kLargestLogRatio);
        return {-(A * l_ - o_.dro_beta / 2 * x * x),
                if_within(o_.dro_beta * x, log_ratio_, kLargestLogRatio) - A};
      }
    }
    return clipped();
  }

  Term reference_kl() const {
    const Term kl = kl_term(o_.kl_form, l_ - t_.reference);
    if (!o_.kl_ratio_weighted) return kl;
    const Ratio r(log_ratio_);
    return {r.value * kl.value, r.value * kl.derivative + r.derivative * kl.value};
  }

  at::Tensor sums(const at::Tensor& weights, const at::Tensor& is_rejected) const {
    const at::Tensor& A = t_.advantages;
    const at::Tensor reference_kl =
        t_.reference.defined() ? kl_term(KlForm::kK3, l_ - t_.reference).value : at::zeros_like(l_);
    const at::Tensor k3 = k_of(3, log_mismatch_);
    const auto count = [&](const at::Tensor& is_it) { return is_it.to(l_.scalar_type()); };
    std::vector<at::Tensor> columns = {ratio_.value,
                                       count((ratio_.value < low_) & (A < 0)),
                                       count((ratio_.value > high_) & (A > 0)),
                                       -log_ratio_,
                                       reference_kl,
                                       -log_mismatch_,
                                       k3,
                                       log_mismatch_.abs(),
                                       at::exp(2 * log_mismatch_),
                                       at::exp(log_mismatch_.abs()),
                                       weights,
                                       weights * weights,
                                       is_capped(weights),
                                       count(is_rejected),
                                       at::ones_like(l_)};
    const auto add_mismatch = [&](const at::Tensor& is_in) {
      for (const at::Tensor& column : {count(is_in), is_in * -log_mismatch_, is_in * k3})
        columns.push_back(column);
    };
    const at::Tensor unknown = at::full_like(l_, -1);
    const at::Tensor age = t_.age.defined() ? t_.age : unknown,
                     depth = t_.depth.defined() ? t_.depth : unknown;
    for (const at::Tensor& is_so_old : {age == 0, age == 1, age >= 2}) add_mismatch(is_so_old);
    for (std::int64_t d = 0; d < kDepths; ++d) add_mismatch(depth == d);
    return at::stack(columns).sum(1);
  }
  at::Tensor largest() const {
    if (l_.numel() == 0) return at::zeros({2}, l_.options());
    return at::stack({ratio_.value.max(), log_mismatch_.abs().max()});
  }

  const PolicyTokens& t_;
  const PolicyOptions& o_;
  const SequenceSums* sequences_;
  at::Tensor l_, old_;
  bool is_bypass_;
  at::Tensor behaviour_, log_ratio_;
  Ratio ratio_;
  at::Tensor log_rho_, log_mismatch_, low_, high_;
};

}  // namespace

at::Tensor interpolation(const at::Tensor& age) {
  // A token younger than a version has an alpha of 0 by the clamp.
  return ((age - 1) / age.clamp_min(1)).clamp(0, 1);
}

std::vector<double*> sums_of(PolicyStatistics& s) {
  std::vector<double*> sums = {
      &s.ratio,       &s.clipped_low,    &s.clipped_high,  &s.old_kl,           &s.reference_kl,
      &s.mismatch_k1, &s.mismatch_k3,    &s.mismatch_abs,  &s.mismatch_squared, &s.mismatch_factor,
      &s.weight,      &s.weight_squared, &s.weight_capped, &s.rejected,         &s.tokens};
  const auto add = [&](MismatchSums& part) {
    sums.insert(sums.end(), {&part.tokens, &part.k1, &part.k3});
  };
  for (MismatchSums& part : s.by_age) add(part);
  for (MismatchSums& part : s.by_depth) add(part);
  sums.push_back(&s.entropy);
  return sums;
}

at::Tensor mean_factors(const PolicyTokens& tokens, const PolicyOptions& options) {
  switch (options.mean) {
    case LossMean::kSequenceToken:
      return 1 / tokens.sequence_tokens;
    case LossMean::kSequenceConstant:
      return at::full_like(tokens.advantages, 1 / options.constant_length);
    case LossMean::kToken:
    case LossMean::kSequenceSum:
    case LossMean::kSum:
      break;
  }
  return at::ones_like(tokens.advantages);
}

bool PolicyOptions::is_by_token() const {
  return loss != PolicyLoss::kGspo && importance != ImportanceWeight::kSequence &&
         (rejection == Rejection::kOff || rejection == Rejection::kToken) && off_policy_delta == 0;
}

PolicyTokens PolicyTokens::narrow(std::int64_t first, std::int64_t count) const {
  PolicyTokens part = *this;
  for (at::Tensor* column :
       {&part.old, &part.behaviour, &part.reference, &part.age, &part.depth, &part.advantages,
        &part.clip_low, &part.clip_high, &part.sequence_tokens, &part.first_advantage})
    if (column->defined()) *column = column->narrow(0, first, count);
  return part;
}

void PolicySums::add(const PolicySums& other) {
  if (!loss.defined()) {
    *this = other;
    return;
  }
  loss = loss + other.loss;
  sums = sums + other.sums;
  largest = at::maximum(largest, other.largest);
}

PolicyLossResult policy_loss(const at::Tensor& logprobs, const PolicyTokens& tokens,
                             const PolicyOptions& options, const SequenceSums* sequences) {
  return Losses(logprobs, tokens, options, sequences).result();
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
