#pragma once

#include "config/run_config.h"
#include "objective/policy_options.h"

namespace heddle::rl {

/// Options of the policy's loss on what is left of a batch.
objective::PolicyOptions policy_options(const config::RunConfig& config);
/// Corrections that are found before a batch's first step, see Experience::correct: the mean of
/// weights, and what leaves the divisor.
objective::PolicyOptions correction_options(const config::RunConfig& config);

}  // namespace heddle::rl
