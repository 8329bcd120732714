#include "rl/step_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

namespace heddle::rl {
namespace {

double deviation_of(const std::vector<double>& values) {
  const double mean = mean_of(values);
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return values.size() < 2 ? 0 : std::sqrt(squares / static_cast<double>(values.size() - 1));
}

/// Means over the tokens of each part, by its number, where it has any.
void report_parts(std::span<const objective::MismatchSums> parts, const Metric& k1,
                  const Metric& k3, train::StepInfo& info) {
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const objective::MismatchSums& part = parts[i];
    if (part.tokens == 0) continue;
    info.metrics.set(k1, std::to_string(i), part.k1 / part.tokens);
    info.metrics.set(k3, std::to_string(i), part.k3 / part.tokens);
  }
}

/// Versions of the batch's tokens, and what waits and runs besides it.
void report_queue(const Batch& batch, train::StepInfo& info) {
  const GenerationCounts& counts = batch.counts;
  std::vector<double> spans;
  double partial = 0, completions = 0;
  for (const Group& group : batch.groups) {
    spans.push_back(static_cast<double>(group.newest_version() - group.oldest_version()));
    completions += static_cast<double>(group.trajectories.size());
    for (const Trajectory& trajectory : group.trajectories) {
      const auto [oldest, newest] = std::ranges::minmax_element(trajectory.versions);
      partial += oldest != trajectory.versions.end() && *oldest != *newest;
    }
  }
  info.metrics.set(metric::kPartialRatio, completions > 0 ? partial / completions : 0);
  info.metrics.set(metric::kSpanMax, spans.empty() ? 0 : *std::ranges::max_element(spans));
  info.metrics.set(metric::kSpanMean, mean_of(spans));
  info.metrics.set(metric::kGroupsRunning, static_cast<double>(counts.running));
  info.metrics.set(metric::kGroupsQueued, static_cast<double>(counts.queued));
  info.metrics.set(metric::kQueueAge, counts.queue_age_s);
  info.metrics.set(metric::kCapacity, static_cast<double>(counts.capacity));
}

}  // namespace

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

void report_groups(std::span<const Group> groups, std::int64_t version,
                   const config::RunConfig& config, train::StepInfo& info) {
  std::vector<double> rewards, lengths;
  std::map<std::string, std::vector<double>> parts;
  std::map<std::int64_t, std::int64_t> by_age;
  double staleness = 0, largest_staleness = 0, truncated = 0, forks = 0;
  for (const Group& group : groups) {
    ++by_age[version - group.oldest_version()];
    const auto age = static_cast<double>(version - group.oldest_version());
    staleness += age;
    largest_staleness = std::max(largest_staleness, age);
    for (const Trajectory& trajectory : group.trajectories) {
      rewards.push_back(trajectory.reward);
      lengths.push_back(static_cast<double>(trajectory.sampled_tokens()));
      truncated += trajectory.is_truncated;
      forks += static_cast<double>(trajectory.forks.size());
      for (const auto& [name, value] : trajectory.parts) parts[name].push_back(value);
    }
  }
  info.metrics.set(metric::kVersion, static_cast<double>(version));
  info.metrics.set(metric::kRewardMean, mean_of(rewards));
  info.metrics.set(metric::kRewardStd, deviation_of(rewards));
  // The part of a verifier that judges alone is the reward itself.
  const bool is_alone = config.rl.reward.verifiers.size() == 1;
  for (const auto& [name, values] : parts) {
    if (!is_alone) info.metrics.set(metric::kRewardPart, name, mean_of(values));
  }
  info.metrics.set(metric::kLengthMean, mean_of(lengths));
  std::ranges::sort(lengths);
  info.metrics.set(metric::kLengthP99, lengths[(lengths.size() * 99 + 99) / 100 - 1]);
  info.metrics.set(metric::kTruncated, truncated / static_cast<double>(rewards.size()));
  if (config.rl.history == config::History::kRender) info.metrics.set(metric::kForks, forks);
  info.metrics.set(metric::kStalenessMean, staleness / static_cast<double>(groups.size()));
  info.metrics.set(metric::kStalenessMax, largest_staleness);
  for (const auto& [age, count] : by_age) {
    if (config.rl.mode == config::RlMode::kAsync)
      info.metrics.set(metric::kStalenessGroups, std::to_string(age), static_cast<double>(count));
  }
}

void report_generation(const Batch& batch, bool is_async, std::int64_t ranks,
                       train::StepInfo& info) {
  const GenerationCounts& counts = batch.counts;
  if (is_async) report_queue(batch, info);
  const double generating = counts.seconds - counts.judging_s;
  const auto set = [&](const Metric& metric, std::int64_t count) {
    info.metrics.set(metric, static_cast<double>(count));
  };
  // A part of a whole, where there is a whole.
  const auto set_share = [&](const Metric& metric, std::int64_t part, double whole) {
    if (whole > 0) info.metrics.set(metric, static_cast<double>(part) / whole);
  };
  set(metric::kGenTokens, counts.tokens);
  const double rate = generating > 0 ? static_cast<double>(counts.tokens) / generating : 0;
  info.metrics.set(metric::kGenTokensPerSecond, rate);
  info.metrics.set(
      metric::kGenTokensPerSecondPerRank,
      rate / static_cast<double>(batch.rollout_ranks > 0 ? batch.rollout_ranks : ranks));
  const auto draws = static_cast<double>(counts.engine.draws);
  set_share(metric::kGenBatch, counts.engine.drawn_sequences, draws);
  set_share(metric::kGenRecorded, counts.engine.recorded_draws, draws);
  set(metric::kGenPrefillSaved, counts.prefill_saved);
  set(metric::kGenPreempted, counts.engine.preempted);
  info.metrics.set(metric::kGenSeconds, generating);
  info.metrics.set(metric::kScoreSeconds, counts.judging_s);
  set(metric::kGroupsAllRight, counts.all_right);
  set(metric::kGroupsAllWrong, counts.all_wrong);
  set(metric::kRejectedFiltered, counts.filtered);
  set_share(metric::kRejectedFilteredTokens, counts.filtered_tokens,
            static_cast<double>(counts.filtered));
  set(metric::kRejectedFailed, counts.failed);
  set_share(metric::kRejectedFailedTokens, counts.failed_tokens,
            static_cast<double>(counts.failed));
  set(metric::kRejectedStale, counts.stale);
  set_share(metric::kRejectedStaleTokens, counts.stale_tokens, static_cast<double>(counts.stale));
}

void report_publications(const Publications& sent, train::StepInfo& info) {
  info.metrics.set(metric::kSyncBytes, static_cast<double>(sent.bytes));
  info.metrics.set(metric::kSyncDamaged, static_cast<double>(sent.damaged));
  info.metrics.set(metric::kSyncVerified, static_cast<double>(sent.verified));
  info.metrics.set(metric::kSyncWireSeconds, sent.wire_s);
  if (sent.wire_s > 0)
    info.metrics.set(metric::kSyncBytesPerSecond, static_cast<double>(sent.bytes) / sent.wire_s);
  if (sent.rendezvous_s > 0) info.metrics.set(metric::kRendezvousSeconds, sent.rendezvous_s);
}

void report_ledger(const LedgerState& state, train::StepInfo& info) {
  std::int64_t rejected = 0;
  for (const auto& [reason, count] : state.rejected) rejected += count;
  info.metrics.set(metric::kLedgerConsumed, static_cast<double>(state.consumed));
  info.metrics.set(metric::kLedgerRejected, static_cast<double>(rejected));
  info.metrics.set(metric::kLedgerPending, static_cast<double>(state.pending.size()));
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
  info.metrics.set(metric::kSyncPauseSeconds, counts.paused_s);
  info.metrics.set(metric::kIdleTrainer, batch->waited_s / info.seconds);
  info.metrics.set(metric::kIdleRollout,
                   counts.elapsed_s > 0 ? std::max(0.0, 1 - counts.seconds / counts.elapsed_s) : 0);
}

void report_policy(const objective::PolicyStatistics& all, std::int64_t dropped, bool has_reference,
                   train::StepInfo& info) {
  const auto left = static_cast<double>(dropped);
  info.metrics.set(metric::kRejectedTokens,
                   all.tokens + left > 0 ? (all.rejected + left) / (all.tokens + left) : 0);
  // Means of no token would read as an entropy that fell to 0, or as a mismatch that is none.
  if (all.tokens == 0) return;
  const auto mean = [&](double sum) { return sum / all.tokens; };
  info.metrics.set(metric::kEntropy, mean(all.entropy));
  info.metrics.set(metric::kKl, mean(all.old_kl));
  if (has_reference) info.metrics.set(metric::kKlReference, mean(all.reference_kl));
  info.metrics.set(metric::kRatioMean, mean(all.ratio));
  info.metrics.set(metric::kRatioMax, all.ratio_max);
  info.metrics.set(metric::kClipLow, mean(all.clipped_low));
  info.metrics.set(metric::kClipHigh, mean(all.clipped_high));
  info.metrics.set(metric::kMismatchK1, mean(all.mismatch_k1));
  info.metrics.set(metric::kMismatchK3, mean(all.mismatch_k3));
  report_parts(all.by_age, metric::kMismatchK1OfAge, metric::kMismatchK3OfAge, info);
  report_parts(all.by_depth, metric::kMismatchK1OfDepth, metric::kMismatchK3OfDepth, info);
  info.metrics.set(metric::kMismatchAbsMean, mean(all.mismatch_abs));
  info.metrics.set(metric::kMismatchAbsMax, all.mismatch_abs_max);
  info.metrics.set(metric::kMismatchChi2, mean(all.mismatch_squared) - 1);
  info.metrics.set(metric::kMismatchMultProbError, mean(all.mismatch_factor));
  info.metrics.set(metric::kMismatchClipped, mean(all.weight_capped));
  info.metrics.set(
      metric::kMismatchEss,
      all.weight_squared > 0 ? all.weight * all.weight / (all.tokens * all.weight_squared) : 0);
}

}  // namespace heddle::rl
