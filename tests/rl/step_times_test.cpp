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
  batch.counts.paused_s = 0.75;
  train::StepInfo info;
  info.seconds = 5;  // of the policy's update
  info.tokens = 32;
  rl::report_times(times, 16, &batch, config, info);
  EXPECT_EQ(info.seconds, 16);
  EXPECT_EQ(info.tokens_per_s, 2);
  const std::pair<const char*, double> expected[] = {
      {"reference_s", 1},     {"critic_values_s", 2}, {"critic_update_s", 3}, {"prepare_s", 0.25},
      {"update_s", 5},        {"record_s", 0.125},    {"wait_s", 4},          {"sync_s", 2},
      {"idle_trainer", 0.25}, {"idle_rollout", 0.25}, {"sync_pause_s", 0.75}};
  for (const auto& [name, value] : expected) EXPECT_EQ(info.metrics.at(name), value) << name;
}

TEST(ReportOfGroups, LengthP99IsTheLeastThatSoManyAreWithin) {
  config::RunConfig config;
  for (const auto& [count, expected] :
       {std::pair(1, 1), {16, 16}, {100, 99}, {200, 198}, {256, 254}}) {
    std::vector<rl::Group> groups(1);
    for (int length = 1; length <= count; ++length) {
      rl::Trajectory& trajectory = groups[0].trajectories.emplace_back();
      trajectory.tokens.resize(static_cast<std::size_t>(length));
      trajectory.versions.resize(static_cast<std::size_t>(length));
    }
    train::StepInfo info;
    rl::report_groups(groups, 0, config, info);
    EXPECT_EQ(info.metrics.at("length_p99"), expected) << count;
  }
}

TEST(ReportOfGeneration, SaysWhoHasSeveralVersionsAndWhatWaits) {
  rl::Batch batch;
  const auto add_group = [&](const std::vector<std::vector<std::int64_t>>& versions) {
    rl::Group& group = batch.groups.emplace_back();
    for (const auto& one : versions) group.trajectories.emplace_back().versions = one;
  };
  add_group({{1, 1}, {1, 2, 2}, {2}, {0, 2}});
  add_group({{3}, {2}, {2}, {2, 2}});
  batch.counts = {.running = 3, .queued = 5, .capacity = 7, .queue_age_s = 0.5};
  train::StepInfo info;
  rl::report_generation(batch, /*is_async=*/true, /*ranks=*/1, info);
  const std::pair<const char*, double> expected[] = {
      {"partial_ratio", 0.25}, {"span_max", 2}, {"span_mean", 1.5},  {"groups_running", 3},
      {"groups_queued", 5},    {"capacity", 7}, {"queue_age_s", 0.5}};
  for (const auto& [name, value] : expected) EXPECT_EQ(info.metrics.at(name), value) << name;
  train::StepInfo other;
  rl::report_generation({}, /*is_async=*/false, /*ranks=*/1, other);
  for (const auto& [name, value] : expected) EXPECT_EQ(other.metrics.find(name), nullptr) << name;
}

TEST(ReportOfGeneration, SaysHowTheEngineRanAndHowLongRejectedGroupsWere) {
  rl::Batch batch;
  batch.counts = {
      .tokens = 1200,
      .filtered = 4,
      .stale = 2,
      .filtered_tokens = 50,
      .stale_tokens = 80,
      .seconds = 5,
      .judging_s = 1,
      .prefill_saved = 99,
      .engine = {.draws = 8, .recorded_draws = 6, .drawn_sequences = 100, .preempted = 3}};
  const auto metrics = [&](std::int64_t ranks) {
    train::StepInfo info;
    rl::report_generation(batch, /*is_async=*/false, ranks, info);
    return info.metrics;
  };
  const Metrics found = metrics(2);
  const std::pair<const char*, double> expected[] = {{"gen_tokens_per_s", 300},
                                                     {"gen_tokens_per_s_per_rank", 150},
                                                     {"gen_batch", 12.5},
                                                     {"gen_recorded", 0.75},
                                                     {"gen_prefill_saved", 99},
                                                     {"gen_preempted", 3},
                                                     {"rejected_filtered_tokens", 12.5},
                                                     {"rejected_stale_tokens", 40}};
  for (const auto& [name, value] : expected) EXPECT_EQ(found.at(name), value) << name;
  EXPECT_EQ(found.find("rejected_failed_tokens"), nullptr);
  // Other ranks than the trainer's two generate.
  batch.rollout_ranks = 3;
  EXPECT_EQ(metrics(2).at("gen_tokens_per_s_per_rank"), 100);
}

TEST(ReportOfPublications, SaysHowFastTheBytesWere) {
  train::StepInfo info;
  rl::report_publications({.bytes = 3000, .damaged = 1, .wire_s = 1.5, .rendezvous_s = 0.25}, info);
  EXPECT_EQ(info.metrics.at("sync_bytes_per_s"), 2000);
  EXPECT_EQ(info.metrics.at("sync_wire_s"), 1.5);
  EXPECT_EQ(info.metrics.at("sync_damaged"), 1);
  EXPECT_EQ(info.metrics.at("rendezvous_s"), 0.25);
  train::StepInfo later;
  rl::report_publications({}, later);
  EXPECT_EQ(later.metrics.find("rendezvous_s"), nullptr);
  EXPECT_EQ(later.metrics.find("sync_bytes_per_s"), nullptr);
}

TEST(ReportOfGroups, SaysHowManyAreHowOld) {
  std::vector<rl::Group> groups(5);
  const std::int64_t oldest[] = {7, 5, 7, 6, 5};
  for (std::size_t i = 0; i < groups.size(); ++i)
    groups[i].trajectories.push_back({.tokens = {1}, .versions = {oldest[i] + 1, oldest[i]}});
  train::StepInfo info, sync;
  config::RunConfig config;
  config.rl.mode = config::RlMode::kAsync;
  rl::report_groups(groups, 7, config, info);
  EXPECT_EQ(info.metrics.at("staleness_groups_0"), 2);
  EXPECT_EQ(info.metrics.at("staleness_groups_1"), 1);
  EXPECT_EQ(info.metrics.at("staleness_groups_2"), 2);
  EXPECT_EQ(info.metrics.at("staleness_mean"), 1);
  config.rl.mode = config::RlMode::kSync;
  rl::report_groups(groups, 7, config, sync);
  EXPECT_EQ(sync.metrics.find("staleness_groups_0"), nullptr);
}

}  // namespace
}  // namespace heddle
