#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "objective/policy_options.h"

namespace heddle::objective {

class SequenceSums;

/// Columns [n] about tokens that the policy chose, on one device and of one dtype. Undefined old:
/// sg(l), so that r = 1, or what PolicyOptions::interpolates_old makes of it; behaviour: none apart
/// from old (bypass); reference: no KL; age and depth:
/// not known; clips: those of the options.
struct PolicyTokens {
  at::Tensor old, behaviour, reference;
  /// Versions between the weights that drew each and those in training.
  at::Tensor age;
  at::Tensor depth;  ///< Number of the part, of kDepths equal parts of the longest sequence each
                     ///< lies in, from 0.
  at::Tensor advantages;
  at::Tensor clip_low, clip_high;  ///< Ratios lo and hi by token.
  // About the sequence of each token:
  at::Tensor sequence_tokens;  ///< Tokens of it that were chosen, on all ranks.
  at::Tensor first_advantage;  ///< Its first chosen token's; for off_policy_delta alone.
  double mean_weight = 1;      ///< Divisor of importance weights.

  /// The tokens from `first` on.
  PolicyTokens narrow(std::int64_t first, std::int64_t count) const;
};

/// alpha [n] of log old = behaviour + alpha (sg(l) - behaviour) for tokens of `age` [n]: (age - 1)
/// / age, which is (v_prox - v_behaviour) / (v_theta - v_behaviour) with v_theta the version in
/// training and v_prox the one before it; 0 at age 0, as in compute_prox_logp_approximations of
/// AReaL (areal/trainer/ppo/actor.py).
at::Tensor interpolation(const at::Tensor& age);

/// Parts of a sequence in which the mismatch is told by depth.
inline constexpr std::int64_t kDepths = 4;

/// Sums over some of the tokens: their number, and k1 and k3 as in PolicyStatistics.
struct MismatchSums {
  double tokens = 0, k1 = 0, k3 = 0;
};

/// Sums over tokens, to be added up over micro-batches and ranks.
struct PolicyStatistics {
  double ratio = 0, clipped_low = 0, clipped_high = 0;
  double old_kl = 0, reference_kl = 0;  ///< k1 of old against pi; k3 of pi against the reference.
  /// k1, k3 and |log| of rho; where old is interpolated, of pi / behaviour.
  double mismatch_k1 = 0, mismatch_k3 = 0, mismatch_abs = 0;
  double mismatch_squared = 0, mismatch_factor = 0;  ///< rho^2 and exp(|log rho|) of the same.
  double weight = 0, weight_squared = 0;             ///< Importance weights.
  double weight_capped = 0;                          ///< Tokens whose weight is importance_cap.
  double rejected = 0;
  std::array<MismatchSums, 3> by_age = {};  ///< Tokens of age 0, 1, and 2 or more.
  std::array<MismatchSums, kDepths> by_depth = {};
  double tokens = 0;                           ///< All of them, rejected or not.
  double entropy = 0;                          ///< For pi's distributions; filled by the objective.
  double ratio_max = 0, mismatch_abs_max = 0;  ///< Largest instead of sums.
};

/// The numbers of PolicyStatistics that add up; the first ones are PolicySums::sums, the last one
/// is the entropy.
std::vector<double*> sums_of(PolicyStatistics& statistics);

/// Loss and statistics of tokens on the device. A new one holds nothing.
struct PolicySums {
  at::Tensor loss;     ///< 0-d
  at::Tensor sums;     ///< In the order of sums_of(), without the entropy.
  at::Tensor largest;  ///< ratio_max, mismatch_abs_max

  void add(const PolicySums& other);
};

struct PolicyLossResult {
  PolicySums sums;
  at::Tensor d_logprobs;  ///< [n], of the loss.
};

/// Loss and its gradient by the log-probabilities [n] of tokens, in their dtype, on the device: the
/// host does not wait. Log-ratios are clamped to +-20 before exp, the KL to +-10; a clamped one has
/// no gradient. rho = old / behaviour, and importance weights multiply the loss; without a
/// behaviour policy apart from old rho = pi / old, which r holds already: then weights enter
/// kReinforce alone. A step's loss is the sum of all over divisor_of(). `sequences` (weights of 1)
/// may be null if options.is_by_token(); else the ranks that share them call together.
PolicyLossResult policy_loss(const at::Tensor& logprobs, const PolicyTokens& tokens,
                             const PolicyOptions& options, const SequenceSums* sequences);

/// [n] factors that options.mean has for the numbers of single tokens before they are summed.
at::Tensor mean_factors(const PolicyTokens& tokens, const PolicyOptions& options);

/// Divisor of the sum over a step, from its numbers of tokens and of sequences with one.
double divisor_of(LossMean mean, double tokens, double sequences);

}  // namespace heddle::objective
