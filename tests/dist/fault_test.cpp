// P13 of the parallel engine: a dead, frozen or failing rank is named, nothing hangs, nothing is
// left behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <random>
#include <thread>

#include "base/text.h"
#include "ckpt/training_checkpoint.h"
#include "dist/launched_run.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using testing::LaunchedRuns;
using ::testing::Not;
using Words = std::vector<std::string>;
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool is_running(pid_t pid) { return kill(pid, 0) == 0; }

class LaunchFailureTest : public ::testing::Test {
 protected:
  /// A launched endless run whose first step is done.
  pid_t start(const std::string& run, std::int64_t ranks, Words words) {
    words.push_back("train.max_steps=100000");
    words.push_back("ckpt.every=3");
    const pid_t launcher =
        testing::start_heddle(runs_.command(run, ranks, "dense", words), runs_.log_of(run));
    EXPECT_TRUE(testing::has_made(launcher, runs_.directory() / run / "metrics.jsonl"))
        << runs_.printed(run);
    ranks_ = testing::children_of(launcher);
    EXPECT_EQ(static_cast<std::int64_t>(ranks_.size()), ranks);
    return launcher;
  }
  /// Until the launcher has started them.
  void find_ranks(pid_t launcher, std::int64_t ranks) {
    const auto last = Clock::now() + std::chrono::seconds(30);
    while (std::ssize(ranks_ = testing::children_of(launcher)) < ranks && Clock::now() < last)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_EQ(std::ssize(ranks_), ranks);
  }
  /// Stops a rank before it has met the others.
  pid_t stop_one_at_its_start(pid_t launcher, std::int64_t ranks, std::mt19937& random) {
    find_ranks(launcher, ranks);
    const pid_t late = ranks_.at(random() % ranks_.size());
    kill(late, SIGSTOP);
    return late;
  }
  void expect_no_rank_runs() const {
    for (const pid_t rank : ranks_) EXPECT_FALSE(is_running(rank));
  }
  void expect_nothing_left(const std::string& run) const {
    expect_no_rank_runs();
    for (const auto& entry : fs::directory_iterator(runs_.directory() / run / "checkpoints")) {
      // A killed rank's unfinished file has another name, and the next run removes it.
      if (entry.path().extension() != "") continue;
      EXPECT_TRUE(fs::exists(entry.path() / "manifest.json")) << entry.path();
    }
  }

  LaunchedRuns runs_;
  std::vector<pid_t> ranks_;
};

TEST_F(LaunchFailureTest, AUsersMistakeIsPrintedWithItsStatus) {
  EXPECT_EQ(runs_.run("run", 2, "dense", {"parallel.dp=3", "parallel.timeout_s=3600"}), 2);
  EXPECT_THAT(runs_.printed("run"), HasSubstr("dp 3"));
  EXPECT_THAT(runs_.printed("run"), HasSubstr("--nproc 3"));
}

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++found;
  return found;
}

TEST_F(LaunchFailureTest, AUsersMistakeIsPrintedOnce) {
  // Found by the launcher, before any rank was started.
  for (const Words& words : {Words{"parallel.dp=3"}, {"parallel.dp=0"}, {"optim.rl=1"}}) {
    EXPECT_EQ(runs_.run("early", 2, "dense", words), 2);
    EXPECT_EQ(count(runs_.printed("early"), "\n"), 1u) << runs_.printed("early");
    EXPECT_FALSE(fs::exists(runs_.directory() / "early.logs/rank-0.log"));
  }
  // Found by the ranks, all or one of them.
  EXPECT_EQ(runs_.run("late", 3, "dense", {"parallel.tp=3"}), 2);
  EXPECT_EQ(count(runs_.printed("late"), "error: parallel.tp is 3"), 1u);
  EXPECT_EQ(count(runs_.printed("late"), "parallel.tp is 3"), 1u) << runs_.printed("late");
  EXPECT_EQ(runs_.run("late", 2, "dense", {"parallel.dp=2", "data.train=none.jsonl"}), 2);
  EXPECT_EQ(count(runs_.printed("late"), "cannot open none.jsonl"), 1u) << runs_.printed("late");
  // The logs of the start before were kept.
  EXPECT_THAT(files::read(runs_.directory() / "late.logs/rank-0.log"), HasSubstr("none.jsonl"));
  std::string kept;
  for (const auto& entry : fs::directory_iterator(runs_.directory() / "late.logs")) {
    const std::string name = entry.path().filename();
    if (name.starts_with("rank-0.") && name != "rank-0.log") kept += files::read(entry.path());
  }
  EXPECT_THAT(kept, HasSubstr("parallel.tp is 3"));
}

TEST_F(LaunchFailureTest, ASlipOfTheFingerStartsNothing) {
  const auto message_of = [&](const Words& options) {
    Words words = {"launch", "--log-dir", (runs_.directory() / "slip").string()};
    words.insert(words.end(), options.begin(), options.end());
    for (const std::string& word : runs_.command("slip", 0, "dense", {"parallel.dp=auto"}))
      words.push_back(word);
    EXPECT_EQ(testing::wait_for(testing::start_heddle(words, runs_.log_of("slip"))), 2);
    EXPECT_FALSE(fs::exists(runs_.directory() / "slip"));
    return runs_.printed("slip");
  };
  EXPECT_THAT(message_of({"--nproc", "99999999999", "--"}),
              HasSubstr("--nproc is 99999999999: that many processes"));
  EXPECT_THAT(message_of({"--nnodes", "99999999999", "--master", "127.0.0.1:29500", "--"}),
              HasSubstr("--nnodes is 99999999999: expected 1 to"));
  EXPECT_EQ(message_of({"--nnodes", "2", "--master", "nosuchhost.invalid:29500", "--"}),
            "error: --master: cannot resolve 'nosuchhost.invalid': Name or service not known\n");
  EXPECT_THAT(message_of({"--nnodes", "2", "--master", "127.0.0.1:0", "--"}),
              HasSubstr("--master 127.0.0.1:0: a port that the system chooses"));
  EXPECT_THAT(message_of({"--nproc_per_node", "2", "--"}), HasSubstr("(did you mean '--nproc'?)"));
  EXPECT_THAT(message_of({"--node_rank=1", "--"}), HasSubstr("(did you mean '--node-rank'?)"));
}

TEST_F(LaunchFailureTest, AMissingDeviceIsNamedBeforeAnyRankWaits) {
  EXPECT_NE(runs_.run("run", 2, "dense", {"parallel.dp=2", "device=cuda:100"}), 0);
  EXPECT_THAT(runs_.printed("run"), HasSubstr("device 'cuda:10"));
}

TEST_F(LaunchFailureTest, AKilledRankEndsTheOthers) {
  // A deadline of an hour: the end of the rank has to end the others.
  const pid_t launcher = start("run", 2, {"parallel.dp=2", "parallel.timeout_s=3600"});
  kill(ranks_[1], SIGKILL);
  EXPECT_EQ(testing::wait_for(launcher), 128 + SIGKILL);
  EXPECT_THAT(runs_.printed("run"), HasSubstr("rank 1 was ended by signal 9"));
  // Where Gloo was built is nothing to a user.
  EXPECT_THAT(files::read(runs_.directory() / "run.logs/rank-0.log"),
              AllOf(HasSubstr("error:"), HasSubstr("rank 1 failed: it was ended by signal 9"),
                    Not(HasSubstr("/gloo/"))));
  expect_nothing_left("run");
  // And the run continues from its last checkpoint.
  EXPECT_EQ(runs_.run("run", 2, "dense", {"parallel.fsdp=2", "train.max_steps=12"}), 0)
      << runs_.printed("run");
}

TEST_F(LaunchFailureTest, AKilledRankIsNamedByALauncherThatLooksLate) {
  const pid_t launcher = start("run", 2, {"parallel.dp=2", "parallel.timeout_s=8"});
  kill(launcher, SIGSTOP);
  kill(ranks_[1], SIGKILL);
  // It loses its connection to the other and ends, too, before the launcher looks at either.
  EXPECT_TRUE(testing::has_ended_within(ranks_[0], std::chrono::seconds(100)));
  kill(launcher, SIGCONT);
  EXPECT_EQ(testing::wait_for(launcher), 128 + SIGKILL);
  EXPECT_THAT(runs_.printed("run"), HasSubstr("rank 1 was ended by signal 9"));
}

TEST_F(LaunchFailureTest, AFrozenRankIsNamedAtTheDeadline) {
  const pid_t launcher = start("run", 2, {"parallel.fsdp=2", "parallel.timeout_s=8"});
  kill(ranks_[1], SIGSTOP);
  EXPECT_EQ(testing::wait_for(launcher), 1);
  EXPECT_THAT(runs_.printed("run"), HasSubstr("no sign of life from rank 1"));
  EXPECT_THAT(runs_.printed("run"), ContainsRegex("gave up after [0-9]+\\.[0-9] s"));
  expect_nothing_left("run");
}

TEST_F(LaunchFailureTest, ARankThatStartsTooLateIsNamedAtTheDeadline) {
  const pid_t launcher = testing::start_heddle(
      runs_.command("run", 4, "dense", {"parallel.tp=2", "parallel.pp=2", "parallel.timeout_s=8"}),
      runs_.log_of("run"));
  std::mt19937 random(9);
  const pid_t late = stop_one_at_its_start(launcher, 4, random);
  const auto number = std::find(ranks_.begin(), ranks_.end(), late) - ranks_.begin();
  EXPECT_NE(testing::wait_for(launcher), 0);
  EXPECT_THAT(runs_.printed("run"),
              AllOf(HasSubstr("error:"), HasSubstr("rank " + std::to_string(number))));
  expect_no_rank_runs();
}

TEST_F(LaunchFailureTest, TheLaunchersDeathEndsTheRanks) {
  const pid_t launcher = start("run", 2, {"parallel.dp=2"});
  kill(launcher, SIGKILL);
  testing::wait_for(launcher);
  for (const pid_t rank : ranks_)
    EXPECT_TRUE(testing::has_ended_within(rank, std::chrono::seconds(60)));
}

TEST_F(LaunchFailureTest, AFrozenLauncherEndsTheRanksAtTheDeadline) {
  for (const Words& layout : {Words{"parallel.dp=2"}, {"parallel.pp=2"}}) {
    const std::string run = layout.front().substr(9, 2);
    const pid_t launcher = start(run, 2, {layout.front(), "parallel.timeout_s=8"});
    const auto begun = Clock::now();
    kill(launcher, SIGSTOP);
    // The ranks' collectives go on without it.
    for (const pid_t rank : ranks_)
      EXPECT_TRUE(testing::has_ended_within(rank, std::chrono::seconds(60)));
    EXPECT_GT(seconds_since(begun), 3);
    kill(launcher, SIGCONT);
    EXPECT_EQ(testing::wait_for(launcher), 1);
    EXPECT_THAT(files::read(runs_.directory() / (run + ".logs") / "rank-1.log"),
                AnyOf(HasSubstr("its process is frozen"), HasSubstr("rank 0 failed")));
    expect_nothing_left(run);
  }
}

TEST_F(LaunchFailureTest, AStopRequestSavesOnAllRanks) {
  const pid_t launcher = start("run", 2, {"parallel.fsdp=2"});
  kill(launcher, SIGINT);
  EXPECT_EQ(testing::wait_for(launcher), 0) << runs_.printed("run");
  EXPECT_THAT(runs_.printed("run"),
              HasSubstr("heddle launch --nproc 2 --log-dir " +
                        (runs_.directory() / "run.logs").string() + " -- pt"));
  expect_nothing_left("run");
}

/// A layout that is interrupted, and the model that it runs.
struct Interrupted {
  std::int64_t ranks;
  const char* model;
  Words overrides;
};

const std::vector<Interrupted> kInterrupted = {
    {3, "dense", {"parallel.dp=3"}},
    {3, "dense", {"parallel.fsdp=3"}},
    {4, "dense", {"parallel.tp=2", "parallel.fsdp=2"}},
    {3, "dense", {"parallel.cp=3"}},
    {4, "dense", {"parallel.cp=2", "parallel.cp_method=ulysses", "parallel.dp=2"}},
    {4, "dense", {"parallel.pp=4"}},
    {4, "moe", {"parallel.pp=2", "parallel.fsdp=2", "parallel.ep=2"}},
    {4, "moe", {"parallel.tp=2", "parallel.cp=2", "parallel.ep=4"}},
};

enum class Fault {
  kKill,
  kFreeze,
  kLateStart,  ///< One rank, seconds after the others; a later one is killed.
};

class KilledLayoutTest : public LaunchFailureTest {
 protected:
  static void sleep_up_to(int milliseconds, std::mt19937& random) {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(std::uniform_int_distribution<int>(300, milliseconds)(random)));
  }
  /// Starts a run that continues where the last one under its name was killed, and interrupts it at
  /// a random moment. Nothing may hang or stay behind.
  void interrupt(const Interrupted& layout, Fault fault, std::mt19937& random) {
    const std::string run = layout.model;
    Words words = layout.overrides;
    // Until then the others of a frozen rank wait.
    words.push_back(fault == Fault::kFreeze ? "parallel.timeout_s=8" : "parallel.timeout_s=3600");
    words.insert(words.end(), {"train.max_steps=100000", "ckpt.every=2"});
    const pid_t launcher = testing::start_heddle(
        runs_.command(run, layout.ranks, layout.model, words), runs_.log_of(run));
    ASSERT_NO_FATAL_FAILURE(find_ranks(launcher, layout.ranks)) << runs_.printed(run);
    if (fault == Fault::kLateStart) {
      const pid_t late = stop_one_at_its_start(launcher, layout.ranks, random);
      sleep_up_to(4000, random);
      kill(late, SIGCONT);
    }
    sleep_up_to(5000, random);
    ASSERT_FALSE(testing::has_ended_within(launcher, std::chrono::milliseconds(0)))
        << runs_.printed(run);
    const std::size_t victim = random() % ranks_.size();
    kill(ranks_[victim], fault == Fault::kFreeze ? SIGSTOP : SIGKILL);
    // A frozen rank is found by the deadline of the others, and ended by the launcher.
    EXPECT_NE(testing::wait_for(launcher), 0) << runs_.printed(run);
    EXPECT_THAT(runs_.printed(run),
                AllOf(HasSubstr("error:"), HasSubstr("rank " + std::to_string(victim))));
    if (fault != Fault::kFreeze) {
      EXPECT_THAT(runs_.printed(run),
                  HasSubstr("rank " + std::to_string(victim) + " was ended by signal 9"));
    }
    expect_no_rank_runs();
    // Not there if it was ended before the first checkpoint.
    if (fs::exists(runs_.directory() / run / "checkpoints")) expect_nothing_left(run);
  }
  /// Runs that were killed continue, under another layout.
  void expect_continues(const char* model) {
    const auto latest = ckpt::latest_complete_checkpoint(runs_.directory() / model / "checkpoints");
    const std::int64_t done = latest ? latest->step : 0;
    EXPECT_EQ(runs_.run(model, 2, model,
                        {"parallel.dp=2", "train.max_steps=" + std::to_string(done + 1)}),
              0)
        << runs_.printed(model);
  }
};

TEST_F(KilledLayoutTest, NoneHangsAndNoneLeavesHalfACheckpoint) {
  std::mt19937 random(7);
  for (const Interrupted& layout : kInterrupted) interrupt(layout, Fault::kKill, random);
  interrupt(kInterrupted[6], Fault::kFreeze, random);
  interrupt(kInterrupted[2], Fault::kLateStart, random);
  for (const char* model : {"dense", "moe"}) expect_continues(model);
}

class FaultKilledLayoutTest : public KilledLayoutTest {};

TEST_F(FaultKilledLayoutTest, ManyKillsFreezesAndLateStarts) {
  std::mt19937 random(8);
  for (int i = 0; i < 200; ++i) {
    SCOPED_TRACE(i);
    const Fault fault = i % 20 == 19  ? Fault::kFreeze
                        : i % 20 == 9 ? Fault::kLateStart
                                      : Fault::kKill;
    interrupt(kInterrupted[i % kInterrupted.size()], fault, random);
    if (i % 25 == 24) {
      for (const char* model : {"dense", "moe"}) expect_continues(model);
    }
  }
}

}  // namespace
}  // namespace heddle
