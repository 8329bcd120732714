// `heddle rl` as two jobs that meet: trainers of one, rollouts of another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <chrono>

#include "dist/reinforcement_run.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class TwoJobsTest : public ReinforcementTest {
 protected:
  /// The rollouts have a directory of their own, and know the trainer's file alone.
  pid_t start_trainer(const std::string& run, int ranks, Words settings) const {
    settings.push_back("rl.role=trainer");
    return testing::start_heddle(command(run, ranks, settings), runs_.log_of(run));
  }
  pid_t start_rollouts(const std::string& run, int ranks, Words settings,
                       const std::string& trainer = "run") const {
    settings.insert(settings.begin(), "sync.rendezvous=" + rendezvous(trainer).string());
    settings.push_back("rl.role=rollout");
    return testing::start_heddle(command(run, ranks, settings), runs_.log_of(run));
  }
  std::filesystem::path rendezvous(const std::string& run) const {
    return runs_.directory() / run / "rendezvous.json";
  }
  /// Waits until a run that goes on has printed the text.
  bool has_printed(pid_t process, const std::string& run, const std::string& text) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(100);
    while (std::chrono::steady_clock::now() < deadline) {
      const bool has_ended = testing::has_ended_within(process, std::chrono::milliseconds(20));
      if (runs_.printed(run).find(text) != std::string::npos) return true;
      if (has_ended) return false;
    }
    return false;
  }
  void expect_equal_runs(const std::string& one, const std::string& other) const {
    EXPECT_TRUE(weights(one) == weights(other)) << other;
    const auto left = metrics(one), right = metrics(other);
    ASSERT_EQ(left.size(), right.size()) << other;
    for (std::size_t i = 0; i < left.size(); ++i) {
      for (const char* figure : {"loss", "grad_norm", "reward_mean", "ledger_consumed",
                                 "staleness_max", "mismatch_k3", "rollout_ranks"})
        EXPECT_EQ(left[i].at(figure), right[i].at(figure)) << other << i << figure;
    }
  }
  static constexpr const char* kEnd = "the trainer needs no rollouts any more";
};

TEST_F(TwoJobsTest, MakeTheRunOfOneJobWhicheverStartsFirst) {
  ASSERT_EQ(train("one", 2, {"rl.rollout_ranks=1"}), 0) << runs_.printed("one");

  pid_t trainer = start_trainer("run", 0, {});
  ASSERT_TRUE(has_printed(trainer, "run", "waits at 127.0.0.1:")) << runs_.printed("run");
  struct stat file {};
  ASSERT_EQ(stat(rendezvous("run").c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
  pid_t rollouts = start_rollouts("late", 0, {"optim.lr=5", "log.report=true"});
  EXPECT_EQ(testing::wait_for(trainer), 0) << runs_.printed("run");
  EXPECT_EQ(testing::wait_for(rollouts), 0) << runs_.printed("late");
  EXPECT_THAT(runs_.printed("late"), HasSubstr(kEnd));
  expect_equal_runs("one", "run");
  expect_ledger("run", 5);
  EXPECT_FALSE(std::filesystem::exists(runs_.directory() / "late"));

  rollouts = start_rollouts("early", 1, {}, "second");
  ASSERT_TRUE(has_printed(rollouts, "early", "rendezvous.json is not there"))
      << runs_.printed("early");
  trainer = start_trainer("second", 1, {});
  EXPECT_EQ(testing::wait_for(trainer), 0) << runs_.printed("second");
  EXPECT_EQ(testing::wait_for(rollouts), 0) << runs_.printed("early");
  expect_equal_runs("one", "second");
}

TEST_F(TwoJobsTest, SeveralRanksOnBothSidesWithStaleness) {
  const Words settings = {"rl.mode=async",
                          "rl.max_staleness=2",
                          "rl.deterministic=true",
                          "rl.update_mode=wait",
                          "rl.max_inflight_groups=3",
                          "rl.rollout_ranks=2",
                          "rl.trainer_ranks=2",
                          "optim.lr=1e-2",
                          "rollout.stop=[e, a]",
                          "rollout.tp=2"};
  Words layout = settings;
  layout.push_back("parallel.fsdp=2");
  ASSERT_EQ(train("one", 4, layout), 0) << runs_.printed("one");
  const pid_t trainer = start_trainer("run", 2, layout),
              rollouts = start_rollouts("rollouts", 2, settings);
  EXPECT_EQ(testing::wait_for(trainer), 0) << runs_.printed("run");
  EXPECT_EQ(testing::wait_for(rollouts), 0) << runs_.printed("rollouts");
  expect_equal_runs("one", "run");
}

TEST_F(TwoJobsTest, StrangersAreRefusedAndTheTrainerWaitsOn) {
  const pid_t trainer = start_trainer("run", 0, {});
  ASSERT_TRUE(has_printed(trainer, "run", "waits at 127.0.0.1:")) << runs_.printed("run");

  const char* const key = "rl.samples_per_group is 4 in the trainer's job and 8 in the rollouts'";
  EXPECT_EQ(testing::wait_for(start_rollouts("key", 0, {"rl.samples_per_group=8"})), 2);
  EXPECT_THAT(runs_.printed("key"), AllOf(HasSubstr("refuses this job"), HasSubstr(key)));
  EXPECT_THAT(runs_.printed("run"), AllOf(HasSubstr("rollout job 1 is refused"), HasSubstr(key)));

  runs_.make_model("other", false, {{"initializer_range", 0.2}});
  EXPECT_EQ(testing::wait_for(start_rollouts(
                "weights", 2, {"model.path=" + (runs_.directory() / "other").string()})),
            2);
  const char* const weights = "the content of the set of weights is";
  EXPECT_THAT(runs_.printed("weights"), HasSubstr(weights));
  EXPECT_THAT(runs_.printed("run"),
              AllOf(HasSubstr("rollout job 2 is refused"), HasSubstr(weights)));

  auto place = nlohmann::json::parse(files::read(rendezvous("run")));
  place["secret"] = std::string(48, '0');
  files::make_writable_directory(rendezvous("forged").parent_path());
  files::write_atomically(rendezvous("forged"), place.dump());
  EXPECT_EQ(testing::wait_for(start_rollouts("forged", 0, {}, "forged")), 2);
  EXPECT_THAT(runs_.printed("forged"), HasSubstr("chmod 600"));
  chmod(rendezvous("forged").c_str(), 0600);
  EXPECT_EQ(
      testing::wait_for(start_rollouts("forged", 0, {"sync.rendezvous_timeout_s=2"}, "forged")), 1);
  EXPECT_THAT(runs_.printed("forged"), HasSubstr("whose secret is another"));
  EXPECT_THAT(runs_.printed("run"), HasSubstr("refused a process from 127.0.0.1"));

  const pid_t rollouts = start_rollouts("own", 0, {});
  EXPECT_EQ(testing::wait_for(rollouts), 0) << runs_.printed("own");
  EXPECT_EQ(testing::wait_for(trainer), 0) << runs_.printed("run");
}

TEST_F(TwoJobsTest, NobodyWaitsWithoutEnd) {
  EXPECT_EQ(testing::wait_for(
                start_trainer("run", 2, {"sync.rendezvous_timeout_s=1", "parallel.fsdp=2"})),
            1);
  EXPECT_THAT(runs_.printed("run"), HasSubstr("no job of rl.role rollout came to 127.0.0.1:"));
  EXPECT_EQ(testing::wait_for(start_rollouts("rollouts", 2, {"sync.rendezvous_timeout_s=1"})), 1);
  EXPECT_THAT(runs_.printed("rollouts"),
              HasSubstr("no trainer was found within 1 s (sync.rendezvous_timeout_s)"));
  EXPECT_EQ(testing::wait_for(start_rollouts("few", 0, {"rl.rollout_ranks=2"})), 2);
  EXPECT_THAT(runs_.printed("few"), HasSubstr("heddle launch --nproc 2"));
  EXPECT_EQ(testing::wait_for(start_trainer("nowhere", 0, {"sync.listen=nowhere"})), 2);
  EXPECT_THAT(runs_.printed("nowhere"), HasSubstr("sync.listen: 'nowhere' is no endpoint"));
}

TEST_F(TwoJobsTest, KilledRolloutsAreReplacedAndGetTheWeights) {
  const Words settings = {"ckpt.every=1", "train.max_steps=40", "sync.verify=1"};
  ASSERT_EQ(train("one", 0, settings), 0) << runs_.printed("one");
  const pid_t trainer = start_trainer("run", 0, settings);
  pid_t rollouts = start_rollouts("first", 1, settings);
  ASSERT_TRUE(testing::has_made(trainer, checkpoints("run") / "step-00000002"))
      << runs_.printed("run");
  const std::vector<pid_t> ranks = testing::children_of(rollouts);
  ASSERT_EQ(ranks.size(), 1u);
  kill(rollouts, SIGKILL);
  EXPECT_EQ(testing::wait_for(rollouts), 128 + SIGKILL);
  EXPECT_TRUE(testing::has_ended_within(ranks[0], std::chrono::seconds(60)));
  rollouts = start_rollouts("second", 0, settings);
  ASSERT_TRUE(testing::has_made(trainer, checkpoints("run") / "step-00000006"))
      << runs_.printed("run");
  // One that is asked to stop says so, and nobody waits for its silence.
  kill(rollouts, SIGTERM);
  EXPECT_EQ(testing::wait_for(rollouts), 0) << runs_.printed("second");
  EXPECT_THAT(runs_.printed("second"), HasSubstr("was asked to stop, and ends"));
  rollouts = start_rollouts("third", 1, settings);
  EXPECT_EQ(testing::wait_for(trainer), 0) << runs_.printed("run");
  EXPECT_EQ(testing::wait_for(rollouts), 0) << runs_.printed("third");
  EXPECT_THAT(runs_.printed("run"),
              AllOf(HasSubstr("rollout job 1 is lost"), HasSubstr("rollout job 2 is lost"),
                    HasSubstr("its job was asked to stop"), HasSubstr("rollout job 3 generates")));
  // Without staleness what was under way is drawn again by the same seeds.
  EXPECT_TRUE(weights("one") == weights("run"));
  expect_ledger("run", 40);
}

TEST_F(TwoJobsTest, ATrainerThatComesAgainMeetsTheRolloutsThatWait) {
  const Words settings = {"rl.rollout_ranks=2", "ckpt.every=1", "train.max_steps=20"};
  ASSERT_EQ(train("one", 3, settings), 0) << runs_.printed("one");
  pid_t trainer = start_trainer("run", 1, settings);
  const pid_t rollouts = start_rollouts("rollouts", 2, settings);
  ASSERT_TRUE(testing::has_made(trainer, checkpoints("run") / "step-00000002"))
      << runs_.printed("run");
  kill(trainer, SIGKILL);
  EXPECT_EQ(testing::wait_for(trainer), 128 + SIGKILL);
  ASSERT_TRUE(has_printed(rollouts, "rollouts", "nothing listens there"))
      << runs_.printed("rollouts");
  trainer = start_trainer("run", 1, settings);
  ASSERT_TRUE(testing::has_made(trainer, checkpoints("run") / "step-00000008"))
      << runs_.printed("run");
  // One that is interrupted ends the rollouts, too.
  kill(trainer, SIGINT);
  EXPECT_EQ(testing::wait_for(trainer), 0) << runs_.printed("run");
  EXPECT_THAT(runs_.printed("run"), HasSubstr("stopped after step"));
  EXPECT_EQ(testing::wait_for(rollouts), 0) << runs_.printed("rollouts");
  EXPECT_THAT(runs_.printed("rollouts"), AllOf(HasSubstr("the trainer is lost"), HasSubstr(kEnd)));
  const pid_t others = start_rollouts("others", 2, settings);
  trainer = start_trainer("run", 0, settings);
  EXPECT_EQ(testing::wait_for(trainer), 0) << runs_.printed("run");
  EXPECT_EQ(testing::wait_for(others), 0) << runs_.printed("others");
  expect_equal_runs("one", "run");
  expect_ledger("run", 20);
}

using FaultTwoJobsTest = TwoJobsTest;

TEST_F(FaultTwoJobsTest, AFrozenSideIsLeftBehind) {
  const Words settings = {"rl.mode=async", "rl.max_staleness=1", "train.max_steps=4000",
                          "ckpt.every=1",  "sync.timeout_s=4",   "parallel.timeout_s=6"};
  pid_t trainer = start_trainer("run", 0, settings);
  const pid_t frozen = start_rollouts("frozen", 0, settings);
  ASSERT_TRUE(testing::has_made(trainer, checkpoints("run") / "step-00000001"))
      << runs_.printed("run");
  kill(frozen, SIGSTOP);
  ASSERT_TRUE(has_printed(trainer, "run", "rollout job 1 is lost")) << runs_.printed("run");
  const pid_t rollouts = start_rollouts("rollouts", 2, settings);
  ASSERT_TRUE(has_printed(trainer, "run", "rollout job 2 generates, on 2 rank(s)"))
      << runs_.printed("run");
  // It comes back to a trainer that has others, and waits for it to need another.
  kill(frozen, SIGCONT);
  ASSERT_TRUE(has_printed(frozen, "frozen", "has not called this job yet"))
      << runs_.printed("frozen");
  // One that stands still while it is called is passed over, and is told.
  kill(frozen, SIGSTOP);
  kill(rollouts, SIGKILL);
  EXPECT_EQ(testing::wait_for(rollouts), 128 + SIGKILL);
  ASSERT_TRUE(has_printed(trainer, "run", "rollout job 3 is passed over")) << runs_.printed("run");
  kill(frozen, SIGCONT);
  ASSERT_TRUE(has_printed(trainer, "run", "rollout job 4 generates, on 1 rank(s)"))
      << runs_.printed("run");
  kill(trainer, SIGINT);
  EXPECT_EQ(testing::wait_for(trainer), 0) << runs_.printed("run");
  EXPECT_EQ(testing::wait_for(frozen), 0) << runs_.printed("frozen");
  const auto rows = metrics("run");
  for (const auto& row : rows) EXPECT_LE(row.at("staleness_max"), 1);
  expect_ledger("run", std::ssize(rows));

  trainer = start_trainer("still", 0, settings);
  const pid_t left = start_rollouts("left", 2, settings, "still");
  ASSERT_TRUE(testing::has_made(trainer, checkpoints("still") / "step-00000001"))
      << runs_.printed("still");
  kill(trainer, SIGSTOP);
  ASSERT_TRUE(has_printed(left, "left", "the trainer is lost")) << runs_.printed("left");
  kill(left, SIGTERM);
  EXPECT_EQ(testing::wait_for(left), 0) << runs_.printed("left");
  kill(trainer, SIGKILL);
  EXPECT_EQ(testing::wait_for(trainer), 128 + SIGKILL);
}

}  // namespace
}  // namespace heddle
