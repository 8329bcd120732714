#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "config/run_config.h"
#include "objective/policy_loss.h"
#include "rl/group_source.h"
#include "train/observer.h"

/// Entries of metrics.jsonl about a step; docs/rl.md says what they mean.
namespace heddle::rl {

/// Seconds of a step on the trainer's ranks by what they do; the update of the policy is the
/// trainer's to time. Parts that a run does not have stay 0.
struct StepTimes {
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  double reference = 0, anchor = 0, critic_values = 0, critic_update = 0;
  double prepare = 0;  ///< Advantages and micro-batches.
  double sync = 0;     ///< Weights to ranks that generate.
  double record = 0;   ///< Ledger, groups.jsonl, hash of the weights.
};

/// Rewards, lengths and ages of the groups that weights of `version` were trained on.
void report_groups(std::span<const Group> groups, std::int64_t version,
                   const config::RunConfig& config, train::StepInfo& info);
/// How the batch came to be. `ranks`: those of the trainer, which generate unless others do.
void report_generation(const Batch& batch, bool is_async, std::int64_t ranks,
                       train::StepInfo& info);
/// Weights that went to other ranks.
void report_publications(const Publications& sent, train::StepInfo& info);
/// Groups of the run so far, by what became of them.
void report_ledger(const LedgerState& state, train::StepInfo& info);
/// Where the step's `seconds` went. `batch`: the one that it is the first step of; null for further
/// ones, which wait for nothing. `info` has the time of the update; it gets that of the whole step.
void report_times(const StepTimes& times, double seconds, const Batch* batch,
                  const config::RunConfig& config, train::StepInfo& info);
/// Statistics of all ranks; `dropped`: rejected tokens that these are without; `has_reference`: the
/// loss holds the policy to one.
void report_policy(const objective::PolicyStatistics& all, std::int64_t dropped, bool has_reference,
                   train::StepInfo& info);

/// 0 without values.
double mean_of(const std::vector<double>& values);

}  // namespace heddle::rl
