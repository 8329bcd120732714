#include "objective/correction.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

#include "objective/sequence_sums.h"

namespace heddle::objective {
namespace {

at::Tensor capped(const at::Tensor& weights, const PolicyOptions& options) {
  return options.importance_cap > 0 ? weights.clamp_max(options.importance_cap) : weights;
}

/// The number that options.rejection bounds.
at::Tensor rejection_statistic(const at::Tensor& log_rho, const at::Tensor& sequence_tokens,
                               const PolicyOptions& options, const SequenceSums* sequences) {
  const auto sum = [&](const at::Tensor& values) {
    return sequences->at_tokens(sequences->of(values));
  };
  const auto mean = [&](const at::Tensor& values) { return sum(values) / sequence_tokens; };
  switch (options.rejection) {
    case Rejection::kToken:
      return at::exp(log_rho);
    case Rejection::kSequence:
      return at::exp(clamp(sum(log_rho), kLargestLogRatio));
    case Rejection::kGeometric:
      return at::exp(clamp(mean(log_rho), kLargestLogRatio));
    default:
      break;
  }
  const int place = static_cast<int>(options.rejection) - static_cast<int>(Rejection::kSumK1);
  const at::Tensor k = k_of(place / 3 + 1, log_rho);
  if (place % 3 == 0) return sum(k);
  return place % 3 == 1 ? mean(k) : sequences->at_tokens(sequences->largest(k));
}

}  // namespace

at::Tensor clamp(const at::Tensor& x, double limit) { return x.clamp(-limit, limit); }

at::Tensor k_of(int form, const at::Tensor& log_rho) {
  switch (form) {
    case 1:
      return -log_rho;
    case 2:
      return log_rho * log_rho / 2;
    default:
      return at::exp(log_rho) - log_rho - 1;
  }
}

at::Tensor importance_weights(const at::Tensor& log_rho, const PolicyOptions& options,
                              const SequenceSums* sequences) {
  switch (options.importance) {
    case ImportanceWeight::kOff:
      break;
    case ImportanceWeight::kToken:
      return capped(at::exp(log_rho), options);
    case ImportanceWeight::kSequence: {
      const at::Tensor sum = sequences->at_tokens(sequences->of(log_rho));
      return capped(at::exp(clamp(sum, kLargestLogRatio)), options);
    }
  }
  return at::ones_like(log_rho);
}

at::Tensor is_rejected(const at::Tensor& log_rho, const at::Tensor& sequence_tokens,
                       const PolicyOptions& options, const SequenceSums* sequences) {
  if (options.rejection == Rejection::kOff)
    return at::zeros(log_rho.sizes(), log_rho.options().dtype(at::kBool));
  const at::Tensor statistic = rejection_statistic(log_rho, sequence_tokens, options, sequences);
  // A statistic that is no number is not within the bounds.
  return ((statistic >= options.rejection_low) & (statistic <= options.rejection_high))
      .logical_not();
}

}  // namespace heddle::objective
