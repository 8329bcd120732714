#include "rl/step_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <utility>

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

void report_groups(std::span<const Group> groups, std::int64_t version, train::StepInfo& info) {
  std::vector<double> rewards, lengths;
  std::map<std::string, std::vector<double>> parts;
  double staleness = 0, largest_staleness = 0, truncated = 0;
  for (const Group& group : groups) {
    const auto age = static_cast<double>(version - group.oldest_version());
    staleness += age;
    largest_staleness = std::max(largest_staleness, age);
    for (const Trajectory& trajectory : group.trajectories) {
      rewards.push_back(trajectory.reward);
      lengths.push_back(static_cast<double>(trajectory.sampled_tokens()));
      truncated += trajectory.is_truncated;
      for (const auto& [name, value] : trajectory.parts) parts[name].push_back(value);
    }
  }
  info.metrics.set(metric::kVersion, static_cast<double>(version));
  info.metrics.set(metric::kRewardMean, mean_of(rewards));
  info.metrics.set(metric::kRewardStd, deviation_of(rewards));
  // A single part is the reward itself.
  for (const auto& [name, values] : parts) {
    if (parts.size() > 1) info.metrics.set(metric::kRewardPart, name, mean_of(values));
  }
  info.metrics.set(metric::kLengthMean, mean_of(lengths));
  std::ranges::sort(lengths);
  info.metrics.set(metric::kLengthP99, lengths[(lengths.size() - 1) * 99 / 100]);
  info.metrics.set(metric::kTruncated, truncated / static_cast<double>(rewards.size()));
  info.metrics.set(metric::kStalenessMean, staleness / static_cast<double>(groups.size()));
  info.metrics.set(metric::kStalenessMax, largest_staleness);
}

void report_generation(const Batch& batch, bool is_async, train::StepInfo& info) {
  const GenerationCounts& counts = batch.counts;
  if (is_async) {
    std::int64_t span = 0;
    double partial = 0, completions = 0;
    for (const Group& group : batch.groups) {
      span = std::max(span, group.newest_version() - group.oldest_version());
      completions += static_cast<double>(group.trajectories.size());
      for (const Trajectory& trajectory : group.trajectories) {
        const auto [oldest, newest] = std::ranges::minmax_element(trajectory.versions);
        partial += oldest != trajectory.versions.end() && *oldest != *newest;
      }
    }
    info.metrics.set(metric::kPartialRatio, completions > 0 ? partial / completions : 0);
    info.metrics.set(metric::kSpanMax, static_cast<double>(span));
    info.metrics.set(metric::kGroupsRunning, static_cast<double>(counts.running));
    info.metrics.set(metric::kGroupsQueued, static_cast<double>(counts.queued));
  }
  const double generating = counts.seconds - counts.judging_s;
  info.metrics.set(metric::kGenTokens, static_cast<double>(counts.tokens));
  info.metrics.set(metric::kGenTokensPerSecond,
                   generating > 0 ? static_cast<double>(counts.tokens) / generating : 0);
  info.metrics.set(metric::kGenSeconds, generating);
  info.metrics.set(metric::kScoreSeconds, counts.judging_s);
  info.metrics.set(metric::kGroupsAllRight, static_cast<double>(counts.all_right));
  info.metrics.set(metric::kGroupsAllWrong, static_cast<double>(counts.all_wrong));
  info.metrics.set(metric::kRejectedFiltered, static_cast<double>(counts.filtered));
  info.metrics.set(metric::kRejectedFailed, static_cast<double>(counts.failed));
  info.metrics.set(metric::kRejectedStale, static_cast<double>(counts.stale));
  std::vector<double> stale_tokens;
  for (const Fate& fate : batch.fates) {
    if (fate.kind == Fate::Kind::kRejected && fate.reason == Rejection::kStale)
      stale_tokens.push_back(static_cast<double>(fate.tokens));
  }
  if (!stale_tokens.empty()) info.metrics.set(metric::kRejectedStaleTokens, mean_of(stale_tokens));
}

void report_times(const StepTimes& times, double seconds, const Batch* batch,
                  const config::RunConfig& config, train::StepInfo& info) {
  const double update = std::exchange(info.seconds, seconds);
  info.tokens_per_s = static_cast<double>(info.tokens) / info.seconds;
  if (config.rl.reference.kl_coef > 0) info.metrics.set(metric::kReferenceSeconds, times.reference);
  if (config.rl.finds_anchor()) info.metrics.set(metric::kOldLogprobsSeconds, times.anchor);
  if (config.rl.has_critic()) {
    info.metrics.set(metric::kCriticValuesSeconds, times.critic_values);
    info.metrics.set(metric::kCriticUpdateSeconds, times.critic_update);
  }
  info.metrics.set(metric::kPrepareSeconds, times.prepare);
  info.metrics.set(metric::kUpdateSeconds, update);
  info.metrics.set(metric::kRecordSeconds, times.record);
  if (!config.rl.is_disaggregated()) return;
  info.metrics.set(metric::kSyncSeconds, times.sync + (batch != nullptr ? batch->sync_s : 0));
  if (batch == nullptr) return;
  const GenerationCounts& counts = batch->counts;
  info.metrics.set(metric::kRolloutRanks, static_cast<double>(batch->rollout_ranks));
  info.metrics.set(metric::kWaitSeconds, batch->waited_s);
  info.metrics.set(metric::kIdleTrainer, batch->waited_s / info.seconds);
  info.metrics.set(metric::kIdleRollout,
                   counts.elapsed_s > 0 ? std::max(0.0, 1 - counts.seconds / counts.elapsed_s) : 0);
}

void report_policy(const objective::PolicyStatistics& all, std::int64_t dropped, bool has_reference,
                   train::StepInfo& info) {
  const auto mean = [&](double sum) { return all.tokens > 0 ? sum / all.tokens : 0; };
  info.metrics.set(metric::kEntropy, mean(all.entropy));
  info.metrics.set(metric::kKl, mean(all.old_kl));
  if (has_reference) info.metrics.set(metric::kKlReference, mean(all.reference_kl));
  info.metrics.set(metric::kRatioMean, mean(all.ratio));
  info.metrics.set(metric::kRatioMax, all.ratio_max);
  info.metrics.set(metric::kClipLow, mean(all.clipped_low));
  info.metrics.set(metric::kClipHigh, mean(all.clipped_high));
  info.metrics.set(metric::kMismatchK1, mean(all.mismatch_k1));
  info.metrics.set(metric::kMismatchK3, mean(all.mismatch_k3));
  const std::tuple<const char*, double, double> ages[] = {
      {"0", all.age0_mismatch_k3, all.age0_tokens},
      {"1", all.age1_mismatch_k3, all.age1_tokens},
      {"2", all.older_mismatch_k3, all.older_tokens}};
  for (const auto& [age, sum, tokens] : ages) {
    if (tokens > 0) info.metrics.set(metric::kMismatchK3OfAge, age, sum / tokens);
  }
  info.metrics.set(metric::kMismatchAbsMean, mean(all.mismatch_abs));
  info.metrics.set(metric::kMismatchAbsMax, all.mismatch_abs_max);
  info.metrics.set(metric::kMismatchChi2, all.tokens > 0 ? mean(all.mismatch_squared) - 1 : 0);
  info.metrics.set(metric::kMismatchMultProbError, all.tokens > 0 ? mean(all.mismatch_factor) : 1);
  info.metrics.set(metric::kMismatchClipped, mean(all.weight_capped));
  info.metrics.set(
      metric::kMismatchEss,
      all.weight_squared > 0 ? all.weight * all.weight / (all.tokens * all.weight_squared) : 0);
  const auto left = static_cast<double>(dropped);
  info.metrics.set(metric::kRejectedTokens,
                   all.tokens + left > 0 ? (all.rejected + left) / (all.tokens + left) : 0);
}

}  // namespace heddle::rl
