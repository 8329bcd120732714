#include "rl/policy_options.h"

namespace heddle::rl {
namespace {

void reject(const config::RlCorrection& correction, objective::PolicyOptions& options) {
  options.rejection = correction.rs;
  options.rejection_low = correction.rs_bounds[0];
  options.rejection_high = correction.rs_bounds[1];
}

}  // namespace

objective::PolicyOptions policy_options(const config::RunConfig& config) {
  const config::RlSection& rl = config.rl;
  objective::PolicyOptions options;
  options.temperature = config.rollout.temperature;
  options.loss = rl.algorithm.loss;
  options.mean = rl.algorithm.mean;
  options.clip_low = rl.algorithm.clip_low;
  options.clip_high = rl.algorithm.clip_high;
  options.dual_clip = rl.algorithm.dual_clip;
  options.sapo_tau_positive = rl.algorithm.sapo_tau_positive;
  options.sapo_tau_negative = rl.algorithm.sapo_tau_negative;
  options.dppo_cap = rl.algorithm.dppo_cap;
  options.dppo_delta = rl.algorithm.dppo_delta;
  options.dro_beta = rl.algorithm.dro_beta;
  options.entropy_coefficient = rl.algorithm.entropy_coef;
  options.constant_length = static_cast<double>(config.rollout.max_new_tokens);
  options.longest_sequence = config.data.max_length;
  if (rl.reference.kl_where == config::KlWhere::kLoss)
    options.kl_coefficient = rl.reference.kl_coef;
  options.kl_form = rl.reference.kl_form;
  options.kl_ratio_weighted = rl.reference.kl_ratio_weighted;
  options.interpolates_old = rl.old_logprobs == config::OldLogprobs::kLogLinear;
  options.importance = rl.correction.is;
  options.importance_cap = rl.correction.is_cap;
  if (!rl.correction.drops()) reject(rl.correction, options);
  options.off_policy_delta = rl.correction.off_policy_delta;
  return options;
}

objective::PolicyOptions correction_options(const config::RunConfig& config) {
  const config::RlCorrection& correction = config.rl.correction;
  objective::PolicyOptions options;
  if (correction.normalizes()) options.importance = correction.is;
  options.importance_cap = correction.is_cap;
  if (correction.drops()) reject(correction, options);
  return options;
}

}  // namespace heddle::rl
