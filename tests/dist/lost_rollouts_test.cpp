// Rollouts that die or freeze while others are left.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <thread>

#include "dist/reinforcement_run.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;

class LostRolloutsTest : public ReinforcementTest {
 protected:
  /// Starts a run whose every step leaves a checkpoint, and waits for the first.
  void start(int ranks, Words settings, int steps) {
    settings.insert(settings.end(),
                    {"rl.mode=async", "rl.max_staleness=1", "ckpt.every=1", "sync.timeout_s=6"});
    settings_ = settings;
    settings.push_back("train.max_steps=" + std::to_string(steps));
    launcher_ = testing::start_heddle(command("run", ranks, settings), runs_.log_of("run"));
    ASSERT_TRUE(testing::has_made(launcher_, checkpoints("run") / "step-00000001"))
        << runs_.printed("run");
    ranks_ = testing::children_of(launcher_);
    ASSERT_EQ(std::ssize(ranks_), ranks);
  }
  /// Waits for a step whose batch so many rollout ranks generated.
  bool goes_on_with(int rollouts) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(100);
    while (std::chrono::steady_clock::now() < deadline) {
      const auto rows = metrics("run");
      if (!rows.empty() && rows.back().at("rollout_ranks") == rollouts) return true;
      if (testing::has_ended_within(launcher_, std::chrono::milliseconds(20))) return false;
    }
    return false;
  }
  /// Starts the run again, to its end after so many steps.
  void expect_ends_after(int ranks, int steps) {
    settings_.push_back("train.max_steps=" + std::to_string(steps));
    ASSERT_EQ(train("run", ranks, settings_), 0) << runs_.printed("run");
    expect_ledger("run", steps);
  }
  std::string log_of_rank(int rank) const {
    return files::read(std::filesystem::path(log_dir("run")) /
                       ("rank-" + std::to_string(rank) + ".log"));
  }

  Words settings_;
  pid_t launcher_ = -1;
  std::vector<pid_t> ranks_;
};

TEST_F(LostRolloutsTest, TheOthersGoOnUntilNoneIsLeft) {
  start(4, {"rl.rollout_ranks=3"}, 4000);
  // The one that asks the reward and speaks to the trainer.
  kill(ranks_[1], SIGKILL);
  ASSERT_TRUE(goes_on_with(2)) << runs_.printed("run");
  EXPECT_THAT(runs_.printed("run"),
              HasSubstr("rl: rank 1 was ended by signal 9 (Killed); the run goes on with 2 of 3 "
                        "rollout ranks, as generation 1"));
  kill(ranks_[3], SIGSTOP);
  ASSERT_TRUE(goes_on_with(1)) << runs_.printed("run");
  EXPECT_THAT(runs_.printed("run"), HasSubstr("rl: rank 3 gave no sign of life for"));
  // A frozen process would hold its device for ever.
  EXPECT_TRUE(testing::has_ended_within(ranks_[3], std::chrono::seconds(60)));
  kill(ranks_[2], SIGKILL);
  EXPECT_EQ(testing::wait_for(launcher_), 128 + SIGKILL) << runs_.printed("run");
  EXPECT_THAT(runs_.printed("run"), HasSubstr("error: rank 2 was ended by signal 9"));
  // The next start has them all again.
  const int steps = static_cast<int>(metrics("run").size()) + 3;
  ASSERT_NO_FATAL_FAILURE(expect_ends_after(4, steps));
  const auto rows = metrics("run");
  ASSERT_EQ(std::ssize(rows), steps);
  for (const auto& row : rows) EXPECT_LE(row.at("staleness_max"), 1);
  EXPECT_EQ(rows.back().at("rollout_ranks"), 3);
}

using FaultLostRolloutsTest = LostRolloutsTest;

TEST_F(FaultLostRolloutsTest, AReplicaIsLostAsAWhole) {
  start(6, {"rl.trainer_ranks=2", "parallel.fsdp=2", "rl.rollout_ranks=4", "rollout.tp=2"}, 12);
  kill(ranks_[3], SIGKILL);
  EXPECT_EQ(testing::wait_for(launcher_), 0) << runs_.printed("run");
  EXPECT_THAT(runs_.printed("run"),
              HasSubstr("rl: rank 3 was ended by signal 9 (Killed), and its "
                        "replica ends (ranks 2); the run goes on with 2 of 4"));
  EXPECT_THAT(
      runs_.printed("run"),
      HasSubstr("ended well without 1 of its 4 rollout ranks: rank 3 was ended by signal 9"));
  EXPECT_THAT(log_of_rank(2), HasSubstr("generation 1 goes on without it (ranks 4, 5)"));
  EXPECT_EQ(metrics("run").back().at("rollout_ranks"), 2);
  expect_ledger("run", 12);
}

TEST_F(FaultLostRolloutsTest, ATrainersDeathEndsTheRun) {
  start(3, {"rl.rollout_ranks=2"}, 12);
  kill(ranks_[0], SIGKILL);
  EXPECT_EQ(testing::wait_for(launcher_), 128 + SIGKILL) << runs_.printed("run");
  EXPECT_THAT(runs_.printed("run"), HasSubstr("error: rank 0 was ended by signal 9"));
  expect_ends_after(3, 12);
}

}  // namespace
}  // namespace heddle
