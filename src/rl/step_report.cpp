#include "rl/step_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

namespace heddle::rl {
namespace {

double deviation_of(const std::vector<double>& values) {
  const double mean = mean_of(values);
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return values.size() < 2 ? 0 : std::sqrt(squares / static_cast<double>(values.size() - 1));
}

}  // namespace

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

void report_groups(const Batch& batch, std::int64_t version, train::StepInfo& info) {
  std::vector<double> rewards, lengths;
  std::map<std::string, std::vector<double>> parts;
  double staleness = 0, largest_staleness = 0, truncated = 0;
  for (const Group& group : batch.groups) {
    const auto age = static_cast<double>(version - group.oldest_version());
    staleness += age;
    largest_staleness = std::max(largest_staleness, age);
    for (const Trajectory& trajectory : group.trajectories) {
      rewards.push_back(trajectory.reward);
      lengths.push_back(static_cast<double>(trajectory.tokens.size()));
      truncated += trajectory.is_truncated;
      for (const auto& [name, value] : trajectory.parts) parts[name].push_back(value);
    }
  }
  info.extra["version"] = static_cast<double>(version);
  info.extra["reward_mean"] = mean_of(rewards);
  info.extra["reward_std"] = deviation_of(rewards);
  // A single part is the reward itself.
  for (const auto& [name, values] : parts) {
    if (parts.size() > 1) info.extra["reward_" + name] = mean_of(values);
  }
  info.extra["length_mean"] = mean_of(lengths);
  std::ranges::sort(lengths);
  info.extra["length_p99"] = lengths[(lengths.size() - 1) * 99 / 100];
  info.extra["truncated"] = truncated / static_cast<double>(rewards.size());
  info.extra["staleness_mean"] = staleness / static_cast<double>(batch.groups.size());
  info.extra["staleness_max"] = largest_staleness;
}

void report_generation(const Batch& batch, bool has_rollout_ranks, train::StepInfo& info) {
  const GenerationCounts& counts = batch.counts;
  const double generating = counts.seconds - counts.judging_s;
  info.extra["gen_tokens"] = static_cast<double>(counts.tokens);
  info.extra["gen_tokens_per_s"] =
      generating > 0 ? static_cast<double>(counts.tokens) / generating : 0;
  info.extra["gen_s"] = generating;
  if (has_rollout_ranks) {
    info.extra["wait_s"] = batch.waited_s;
    info.extra["sync_s"] = batch.sync_s;
  }
  info.extra["score_s"] = counts.judging_s;
  info.extra["groups_all_right"] = static_cast<double>(counts.all_right);
  info.extra["groups_all_wrong"] = static_cast<double>(counts.all_wrong);
  info.extra["rejected_filtered"] = static_cast<double>(counts.filtered);
  info.extra["rejected_failed"] = static_cast<double>(counts.failed);
  info.extra["rejected_stale"] = static_cast<double>(counts.stale);
}

void report_policy(const objective::PolicyStatistics& all, bool has_reference,
                   train::StepInfo& info) {
  const auto mean = [&](double sum) { return all.tokens > 0 ? sum / all.tokens : 0; };
  info.extra["entropy"] = mean(all.entropy);
  info.extra["kl"] = mean(all.old_kl);
  if (has_reference) info.extra["kl_ref"] = mean(all.reference_kl);
  info.extra["ratio_mean"] = mean(all.ratio);
  info.extra["ratio_max"] = all.ratio_max;
  info.extra["clip_low"] = mean(all.clipped_low);
  info.extra["clip_high"] = mean(all.clipped_high);
  info.extra["mismatch_k1"] = mean(all.mismatch_k1);
  info.extra["mismatch_k3"] = mean(all.mismatch_k3);
  info.extra["mismatch_abs_mean"] = mean(all.mismatch_abs);
  info.extra["mismatch_abs_max"] = all.mismatch_abs_max;
  info.extra["mismatch_ess"] =
      all.weight_squared > 0 ? all.weight * all.weight / (all.tokens * all.weight_squared) : 0;
  info.extra["rejected_tokens"] = mean(all.rejected);
}

}  // namespace heddle::rl
