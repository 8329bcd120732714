#include "base/metrics.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "base/errors.h"

namespace heddle {

std::string_view to_string(Metric::Unit unit) {
  switch (unit) {
    case Metric::Unit::kNumber:
      return "";
    case Metric::Unit::kCount:
      return "count";
    case Metric::Unit::kShare:
      return "share";
    case Metric::Unit::kNats:
      return "nats";
    case Metric::Unit::kReward:
      return "reward";
    case Metric::Unit::kTokens:
      return "tokens";
    case Metric::Unit::kSeconds:
      return "s";
    case Metric::Unit::kTokensPerSecond:
      return "tokens/s";
    case Metric::Unit::kBytes:
      return "bytes";
    case Metric::Unit::kBytesPerSecond:
      return "bytes/s";
  }
  return "";
}

void Metrics::set(const Metric& metric, std::string_view part, double value) {
  const std::size_t star = metric.name.find('*');
  if (star == std::string_view::npos)
    throw_error<InternalError>("the metric {} has no parts", metric.name);
  std::string name(metric.name);
  put(metric, name.replace(star, 1, part), value);
}

void Metrics::put(const Metric& metric, std::string name, double value) {
  const auto same = [&](const Entry& entry) { return entry.name == name; };
  if (const auto it = std::ranges::find_if(entries_, same); it != entries_.end()) {
    *it = {&metric, std::move(name), value};
  } else {
    entries_.push_back({&metric, std::move(name), value});
  }
}

void Metrics::add_evaluation(const Metrics& figures) {
  for (const Entry& entry : figures) put(*entry.metric, "eval_" + entry.name, entry.value);
}

const double* Metrics::find(std::string_view name) const {
  const auto same = [&](const Entry& entry) { return entry.name == name; };
  const auto it = std::ranges::find_if(entries_, same);
  return it == entries_.end() ? nullptr : &it->value;
}

double Metrics::at(std::string_view name) const {
  if (const double* value = find(name)) return *value;
  throw_error<InternalError>("the metric {} was not set", name);
}

std::span<const Metric* const> all_metrics() {
  using namespace metric;
  static constexpr std::array kAll = {&kStep,
                                      &kEpoch,
                                      &kLoss,
                                      &kLr,
                                      &kGradNorm,
                                      &kGradCosPrev,
                                      &kTokens,
                                      &kLossTokens,
                                      &kTokensPerSecond,
                                      &kStepSeconds,
                                      &kUnixTime,
                                      &kMfu,
                                      &kMemoryBytes,
                                      &kEntropy,
                                      &kEntropyCoef,
                                      &kRecomputedLayers,
                                      &kAuxLoss,
                                      &kMoeLoad,
                                      &kMoeLoadMean,
                                      &kRouterAgreement,
                                      &kRouterReplayed,
                                      &kRouterMissing,
                                      &kEvalLoss,
                                      &kEval,
                                      &kSkippedSteps,
                                      &kAccuracy,
                                      &kMacroF1,
                                      &kAccuracyAt1,
                                      &kMrrAt10,
                                      &kRewardMargin,
                                      &kRewardAccuracy,
                                      &kLogpsChosen,
                                      &kLogpsRejected,
                                      &kMargin,
                                      &kVersion,
                                      &kRewardMean,
                                      &kRewardStd,
                                      &kRewardPart,
                                      &kReward,
                                      &kLength,
                                      &kLengthMean,
                                      &kLengthP99,
                                      &kTruncated,
                                      &kForks,
                                      &kStalenessMean,
                                      &kStalenessMax,
                                      &kStalenessGroups,
                                      &kPartialRatio,
                                      &kSpanMax,
                                      &kSpanMean,
                                      &kGroupsRunning,
                                      &kGroupsQueued,
                                      &kQueueAge,
                                      &kCapacity,
                                      &kGenTokens,
                                      &kGenTokensPerSecond,
                                      &kGenTokensPerSecondPerRank,
                                      &kGenBatch,
                                      &kGenRecorded,
                                      &kGenPrefillSaved,
                                      &kGenPreempted,
                                      &kGenSeconds,
                                      &kScoreSeconds,
                                      &kRolloutRanks,
                                      &kWaitSeconds,
                                      &kSyncSeconds,
                                      &kSyncBytes,
                                      &kSyncBytesPerSecond,
                                      &kSyncWireSeconds,
                                      &kSyncPauseSeconds,
                                      &kRendezvousSeconds,
                                      &kSyncDamaged,
                                      &kSyncVerified,
                                      &kReferenceSeconds,
                                      &kOldLogprobsSeconds,
                                      &kCriticValuesSeconds,
                                      &kCriticUpdateSeconds,
                                      &kPrepareSeconds,
                                      &kUpdateSeconds,
                                      &kRecordSeconds,
                                      &kIdleTrainer,
                                      &kIdleRollout,
                                      &kGroupsAllRight,
                                      &kGroupsAllWrong,
                                      &kRejectedFiltered,
                                      &kRejectedFilteredTokens,
                                      &kRejectedFailed,
                                      &kRejectedFailedTokens,
                                      &kRejectedStale,
                                      &kRejectedStaleTokens,
                                      &kLedgerConsumed,
                                      &kLedgerRejected,
                                      &kLedgerPending,
                                      &kKl,
                                      &kKlReference,
                                      &kRatioMean,
                                      &kRatioMax,
                                      &kClipLow,
                                      &kClipHigh,
                                      &kMismatchK1,
                                      &kMismatchK3,
                                      &kMismatchK1OfAge,
                                      &kMismatchK3OfAge,
                                      &kMismatchK1OfDepth,
                                      &kMismatchK3OfDepth,
                                      &kMismatchAbsMean,
                                      &kMismatchAbsMax,
                                      &kMismatchChi2,
                                      &kMismatchMultProbError,
                                      &kMismatchEss,
                                      &kMismatchClipped,
                                      &kRejectedTokens,
                                      &kValueLoss,
                                      &kValueClipped,
                                      &kExplainedVariance,
                                      &kCriticGradNorm};
  return kAll;
}

std::string metrics_document() {
  std::string text =
      "# Metrics\n\n"
      "A run appends a row a step to `metrics.jsonl`: a JSON object with these entries, as far as "
      "the run has\nthem. TensorBoard and `log.command` get the same. A figure that is not finite "
      "is `null`. Figures of\nseveral ranks are global, but for the memory, which is that of rank "
      "0. This page is printed by\n`heddle config --metrics`.\n\n"
      "| metric | unit | meaning |\n|---|---|---|\n";
  for (const Metric* metric : all_metrics())
    text +=
        fmt::format("| `{}` | {} | {} |\n", metric->name, to_string(metric->unit), metric->meaning);
  return text;
}

}  // namespace heddle
