// Where the time of a step of `heddle rl` goes.
#include <gtest/gtest.h>

#include <utility>

#include "base/metrics.h"
#include "rl/rl_fixture.h"
#include "rl/step_report.h"

namespace heddle {
namespace {

class StepTimes : public RlTest {
 protected:
  /// Parts of a step of one process.
  static constexpr const char* kParts[] = {"gen_s",           "score_s",         "reference_s",
                                           "critic_values_s", "critic_update_s", "prepare_s",
                                           "update_s",        "record_s"};
};

TEST_F(StepTimes, HaveAllPartsOfTheRun) {
  const Reports reports =
      train(run("critic", {"rl.algorithm.advantage=gae", "rl.reference.kl_coef=0.05"}));
  for (const train::StepInfo& step : reports.steps) {
    for (const char* part : kParts) EXPECT_GT(step.metrics.at(part), 0) << part;
    for (const char* other : {"wait_s", "sync_s", "idle_trainer", "idle_rollout"})
      EXPECT_EQ(step.metrics.find(other), nullptr) << other;
  }
}

TEST_F(StepTimes, HaveNoPartsThatTheRunLacks) {
  const Reports reports = train(run("plain", {"rl.mode=async", "rl.max_staleness=2"}));
  for (const char* part : {"reference_s", "critic_values_s", "critic_update_s"})
    EXPECT_EQ(reports.steps.front().metrics.find(part), nullptr) << part;
}

TEST(ReportOfTimes, SaysEachPartAndTheWhole) {
  config::RunConfig config;
  config.rl.reference.kl_coef = 0.1;
  config.rl.algorithm.advantage = objective::Advantage::kGae;
  config.rl.rollout_ranks = 2;
  rl::StepTimes times;
  times.reference = 1;
  times.critic_values = 2;
  times.critic_update = 3;
  times.prepare = 0.25;
  times.sync = 0.5;
  times.record = 0.125;
  rl::Batch batch;
  batch.waited_s = 4;
  batch.sync_s = 1.5;
  batch.rollout_ranks = 2;
  batch.counts.seconds = 6;
  batch.counts.elapsed_s = 8;
  train::StepInfo info;
  info.seconds = 5;  // of the policy's update
  info.tokens = 32;
  rl::report_times(times, 16, &batch, config, info);
  EXPECT_EQ(info.seconds, 16);
  EXPECT_EQ(info.tokens_per_s, 2);
  const std::pair<const char*, double> expected[] = {
      {"reference_s", 1},     {"critic_values_s", 2}, {"critic_update_s", 3}, {"prepare_s", 0.25},
      {"update_s", 5},        {"record_s", 0.125},    {"wait_s", 4},          {"sync_s", 2},
      {"idle_trainer", 0.25}, {"idle_rollout", 0.25}};
  for (const auto& [name, value] : expected) EXPECT_EQ(info.metrics.at(name), value) << name;
}

TEST(ReportOfGeneration, SaysWhoHasSeveralVersionsAndHowLongStaleGroupsWere) {
  rl::Batch batch;
  rl::Group& group = batch.groups.emplace_back();
  for (const std::vector<std::int64_t>& versions :
       {std::vector<std::int64_t>{1, 1}, {1, 2, 2}, {2}, {0, 2}})
    group.trajectories.emplace_back().versions = versions;
  const auto rejected = [&](rl::Rejection reason, std::int64_t tokens) {
    batch.fates.push_back({rl::Fate::Kind::kRejected, {}, reason, tokens});
  };
  rejected(rl::Rejection::kStale, 30), rejected(rl::Rejection::kFailed, 500);
  rejected(rl::Rejection::kStale, 50);
  train::StepInfo info;
  rl::report_generation(batch, /*is_async=*/true, info);
  EXPECT_EQ(info.metrics.at("partial_ratio"), 0.5);
  EXPECT_EQ(info.metrics.at("span_max"), 2);
  EXPECT_EQ(info.metrics.at("rejected_stale_tokens"), 40);
  train::StepInfo other;
  rl::report_generation({}, /*is_async=*/false, other);
  EXPECT_EQ(other.metrics.find("partial_ratio"), nullptr);
  EXPECT_EQ(other.metrics.find("rejected_stale_tokens"), nullptr);
}

}  // namespace
}  // namespace heddle
