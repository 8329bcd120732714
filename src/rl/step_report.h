#pragma once

#include <cstdint>
#include <vector>

#include "objective/policy_loss.h"
#include "rl/group_source.h"
#include "train/observer.h"

/// Entries of metrics.jsonl about a step; docs/rl.md says what they mean.
namespace heddle::rl {

/// Rewards, lengths and ages of the batch that weights of `version` were trained on.
void report_groups(const Batch& batch, std::int64_t version, train::StepInfo& info);
/// How the batch came to be.
void report_generation(const Batch& batch, bool has_rollout_ranks, train::StepInfo& info);
/// Statistics of all ranks; `has_reference`: the loss holds the policy to one.
void report_policy(const objective::PolicyStatistics& all, bool has_reference,
                   train::StepInfo& info);

/// 0 without values.
double mean_of(const std::vector<double>& values);

}  // namespace heddle::rl
