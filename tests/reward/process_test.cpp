#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "reward/reward.h"
#include "reward/score_queue.h"
#include "reward/wire.h"
#include "testing/message_of.h"
#include "testing/paths.h"
#include "testing/process.h"
#include "testing/temporary_directory.h"

namespace heddle::reward {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ProcessOptions program() {
  ProcessOptions options;
  options.command = {testing::built_path("tests/reward/heddle_reward_worker")};
  options.timeout_s = 100;
  return options;
}

std::unique_ptr<Reward> reward_of(const ProcessOptions& process) {
  RewardOptions options;
  options.process = process;
  return make_reward(options);
}

std::vector<Sample> samples_of(const std::vector<std::string>& completions) {
  std::vector<Sample> samples;
  for (const std::string& completion : completions) {
    samples.emplace_back();
    samples.back().completion = completion;
  }
  return samples;
}

TEST(ProcessReward, GivesScoresInTheOrderOfTheSamples) {
  const auto reward = reward_of(program());
  for (int round = 0; round < 3; ++round) {
    std::vector<std::string> completions;
    for (std::size_t k = 1; k <= 50; ++k) completions.push_back(std::string(k, 'a'));
    completions.push_back(std::string(300'000, 'b'));  // more than a pipe holds
    const auto scores = reward->score(samples_of(completions));
    ASSERT_EQ(scores.size(), completions.size());
    for (std::size_t k = 0; k < scores.size(); ++k) {
      EXPECT_FALSE(scores[k].error) << *scores[k].error;
      EXPECT_EQ(scores[k].reward, static_cast<double>(completions[k].size()));
      EXPECT_EQ(scores[k].parts.at("length"), scores[k].reward);
    }
  }
}

TEST(ProcessReward, TheProgramGetsTheEnvironmentWithoutTheSecretOfTheJob) {
  for (const char* name : {"HEDDLE_LAUNCH_SECRET", "HEDDLE_LAUNCH_SECRET_FILE", "HEDDLE_OTHER"})
    setenv(name, "a value", 1);
  const auto reward = reward_of(program());
  const auto scores = reward->score(
      samples_of({"variable HEDDLE_LAUNCH_SECRET", "variable HEDDLE_LAUNCH_SECRET_FILE",
                  "variable HEDDLE_OTHER", "variable PATH", "variable HEDDLE_UNSET"}));
  for (const char* name : {"HEDDLE_LAUNCH_SECRET", "HEDDLE_LAUNCH_SECRET_FILE", "HEDDLE_OTHER"})
    unsetenv(name);
  std::vector<double> are_set;
  for (const Score& score : scores) are_set.push_back(score.reward);
  // A file is for those who may read it.
  EXPECT_EQ(are_set, (std::vector<double>{0, 1, 1, 1, 0}));
}

TEST(ProcessReward, AnswersATurnWithTextForTheNext) {
  const auto reward = reward_of(program());
  std::vector<Sample> samples = samples_of({"first"});
  samples[0].meta = {{"turns", 2}};
  const Score first = reward->score(samples)[0];
  EXPECT_EQ(first.observation, " again:");
  EXPECT_EQ(first.reward, 0.25);
  samples[0].turns.push_back({"first", " again:"});
  const Score last = reward->score(samples)[0];
  EXPECT_FALSE(last.observation);
  EXPECT_EQ(last.reward, 1);
}

TEST(RewardWire, ReadsAnObservationOrSaysWhatIsWrongWithIt) {
  EXPECT_EQ(from_wire({{"observation", "on"}}).observation, "on");
  EXPECT_EQ(from_wire({{"observation", "on"}}).reward, 0);
  EXPECT_EQ(from_wire({{"observation", "on"}, {"reward", nullptr}}).error, std::nullopt);
  for (const Json& wrong : {Json(""), Json(1), Json(std::string(1 << 21, 'x'))}) {
    const Score score = from_wire({{"observation", wrong}, {"reward", 1}});
    ASSERT_TRUE(score.error);
    EXPECT_NE(score.error->find("'observation' must be text of 1 byte to 1 MiB"),
              std::string::npos);
  }
}

TEST(ProcessReward, SurvivesBytesThatAreNotText) {
  const auto scores = reward_of(program())->score(samples_of({"a\xff\nb"}));
  EXPECT_FALSE(scores[0].error) << *scores[0].error;
}

TEST(ProcessReward, FailsOnlyTheSampleThatEndsItsWorker) {
  const auto scores = reward_of(program())->score(
      samples_of({"aa", "die", "a", "rubbish", "error", "nan", "aaa", "NaN"}));
  EXPECT_EQ(scores[0].reward, 2);
  EXPECT_NE(scores[1].error.value_or("").find("exit status 3"), std::string::npos);
  EXPECT_EQ(scores[2].reward, 1);
  EXPECT_NE(scores[3].error.value_or("").find("rubbish"), std::string::npos);
  EXPECT_EQ(scores[4].error.value_or(""), "no such problem");
  EXPECT_NE(scores[5].error.value_or("").find("finite number"), std::string::npos);
  EXPECT_EQ(scores[6].reward, 3);
  EXPECT_NE(scores[7].error.value_or("").find("NaN at column"), std::string::npos)
      << scores[7].error.value_or("");
}

TEST(ProcessReward, TriesAgainOnce) {
  const testing::TemporaryDirectory folder;
  const std::string completion = "die-once " + (folder / "mark").string();
  const auto scores = reward_of(program())->score(samples_of({completion}));
  EXPECT_FALSE(scores[0].error) << *scores[0].error;
}

TEST(ProcessReward, GivesTheValueOfFailures) {
  ProcessOptions options = program();
  options.failed = -1;
  const auto scores = reward_of(options)->score(samples_of({"die", "a"}));
  EXPECT_FALSE(scores[0].error);
  EXPECT_EQ(scores[0].reward, -1);
  EXPECT_EQ(scores[1].reward, 1);
}

TEST(ProcessReward, AProgramThatNeverAnswersIsNotAskedForEver) {
  ProcessOptions options = program();
  options.command = {"sleep", "100"};
  options.timeout_s = 0.2;
  options.start_timeout_s = 0.3;
  const auto reward = reward_of(options);
  const std::string message = testing::message_of([&] {
    reward->score(samples_of({"a", "b", "c", "d", "e", "f"}));
  });
  EXPECT_NE(message.find("'sleep 100' was started 3 times and never answered within 0.5 s"),
            std::string::npos)
      << message;
  // Whoever says what such a completion is worth has said it.
  options.failed = -1;
  for (const Score& score : reward_of(options)->score(samples_of({"a", "b", "c", "d"})))
    EXPECT_EQ(score.reward, -1);
}

TEST(ProcessReward, EndsALateWorkerWithAllThatItStarted) {
  const testing::TemporaryDirectory folder;
  ProcessOptions options = program();
  options.timeout_s = 0.2;
  options.start_timeout_s = 3;
  const auto reward = reward_of(options);
  // A worker that has answered is late sooner than one that starts.
  reward->score(samples_of({"a", "a"}));
  std::vector<Sample> samples = samples_of({"child", "a"});
  samples[0].truth = (folder / "pid").string();
  const auto scores = reward->score(samples);
  EXPECT_NE(scores[0].error.value_or("").find("no answer within "), std::string::npos);
  EXPECT_EQ(scores[1].reward, 1);
  pid_t child = 0;
  std::ifstream(folder / "pid") >> child;
  ASSERT_GT(child, 0);
  EXPECT_TRUE(testing::has_ended_within(child, std::chrono::seconds(60)));
}

TEST(ProcessReward, EndsItsWorkersWithItself) {
  auto reward = reward_of(program());
  const auto worker = static_cast<pid_t>(reward->score(samples_of({"pid"}))[0].reward);
  ASSERT_EQ(::kill(worker, 0), 0);
  reward.reset();
  EXPECT_NE(::kill(worker, 0), 0);
}

TEST(ProcessReward, WorkersMayGiveBackWhatTheyHoldAtTheEnd) {
  const testing::TemporaryDirectory folder;
  const auto sample = [&](const char* name) {
    return samples_of({"make-at-end " + (folder / name).string()});
  };
  auto reward = reward_of(program());
  reward->score(sample("reward"));
  reward.reset();
  EXPECT_TRUE(std::filesystem::exists(folder / "reward"));
  RewardOptions options;
  options.process = program();
  {
    ScoreQueue queue(options);
    queue.submit(sample("queue").front());
    while (queue.take(std::chrono::milliseconds(100)).empty()) continue;
  }
  EXPECT_TRUE(std::filesystem::exists(folder / "queue"));
}

TEST(ProcessReward, OutlivesTheThreadThatAsks) {
  const auto reward = reward_of(program());
  double first = 0;
  std::thread([&] { first = reward->score(samples_of({"pid"}))[0].reward; }).join();
  ProcessOptions options = program();
  EXPECT_EQ(reward->score(samples_of({"pid", "a"}))[0].reward, first);
}

TEST(ProcessReward, LimitsMemoryAndProcessorTime) {
  ProcessOptions options = program();
  EXPECT_EQ(reward_of(options)->score(samples_of({"memory"}))[0].reward, 0);
  options.memory_bytes = std::int64_t{1} << 31;
  options.cpu_seconds = 1;
  options.workers = 1;
  const auto reward = reward_of(options);
  EXPECT_EQ(reward->score(samples_of({"memory"}))[0].reward, 1);
  EXPECT_THAT(reward->score(samples_of({"spin"}))[0].error.value_or(""),
              HasSubstr("rl.reward.cpu_seconds"));
}

TEST(ProcessReward, RefusesAProgramThatIsNotThere) {
  ProcessOptions options;
  options.command = {"/no/such/program"};
  const auto reward = reward_of(options);
  for (int k = 0; k < 2; ++k) EXPECT_THROW(reward->score(samples_of({"a"})), ConfigError);
}

TEST(ProcessReward, SaysWhyAProgramCannotBeStarted) {
  const testing::TemporaryDirectory folder;
  const auto script = [&](const char* name, const char* text, bool may_run) {
    const std::filesystem::path path = folder / name;
    std::ofstream(path) << text;
    if (may_run) std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path.string();
  };
  const auto refused = [](const std::string& program) {
    ProcessOptions options;
    options.command = {program};
    return testing::message_of([&] { reward_of(options)->score(samples_of({"a"})); });
  };
  EXPECT_THAT(refused(script("no-mode", "#!/bin/sh\n", false)), HasSubstr("chmod +x"));
  EXPECT_THAT(refused(script("no-shell", "#!/no/such/shell\n", true)), HasSubstr("interpreter"));
  EXPECT_THAT(refused("python3 verify.py"), HasSubstr("are a list"));
}

TEST(ProcessReward, PartsDoNotTakeTheNamesOfTheRewardsOwnFigures) {
  const testing::TemporaryDirectory folder;
  const auto told = [&](const std::string& part) {
    const std::string path = (folder / ("tells-" + part)).string();
    std::ofstream(path)
        << "#!/bin/sh\nexec sed -u 's/.*\"id\": *\"\\([^\"]*\\)\".*/{\"id\":\"\\1\","
           "\"reward\":1,\"parts\":{\""
        << part << "\":3}}/'\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    ProcessOptions options;
    options.command = {path};
    return reward_of(options)->score(samples_of({"a"}))[0];
  };
  for (const char* part : {"mean", "std"})
    EXPECT_THAT(told(part).error.value_or(""), HasSubstr("must be others than mean and std"));
  const Score win = told("win");
  EXPECT_EQ(win.error.value_or(""), "");
  EXPECT_EQ(win.parts.at("win"), 3);
}

TEST(ProcessReward, TellsAWorkersWaysOfNotAnsweringApart) {
  const auto error_of = [](const char* completion) {
    const auto scores = reward_of(program())->score(samples_of({completion}));
    return scores[0].error.value_or("");
  };
  EXPECT_THAT(error_of("die"), HasSubstr("heddle_reward_worker) ended (exit status 3)"));
  EXPECT_THAT(error_of("close-output"), HasSubstr("closed its standard output"));
  EXPECT_THAT(error_of("endless-line"), HasSubstr("wrote a line of more than 16 MiB"));
}

TEST(ProcessReward, NamesWorkerAndRowOfAFault) {
  ProcessOptions options = program();
  options.first_worker = 6;
  options.workers = 1;
  std::vector<Sample> samples = samples_of({"die"});
  samples[0].place = "rows.jsonl:7";
  ::testing::internal::CaptureStderr();
  reward_of(options)->score(samples);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("worker 6 ("), HasSubstr("asked about rows.jsonl:7; it is started")));
}

TEST(ProcessReward, KeepsALoopThatPrintsOutOfTheLog) {
  ProcessOptions options = program();
  options.workers = 1;
  const auto reward = reward_of(options);
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(reward->score(samples_of({"flood"}))[0].error);
  const std::string flood = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(flood, AllOf(HasSubstr("loop that prints 0\n"), HasSubstr("is left out")));
  EXPECT_LT(flood.size(), 1U << 20);
  // After an answer there is room again.
  ::testing::internal::CaptureStderr();
  reward->score(samples_of({"a", "aa"}));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("judged a\n"));
}

TEST(ProcessReward, LeavesNoProcessBehindWhenItIsKilled) {
  const testing::TemporaryDirectory folder;
  const std::string held = (folder / "held").string();
  ASSERT_EQ(::mkfifo(held.c_str(), 0600), 0);
  const int reader = ::open(held.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  const pid_t run = ::fork();
  if (run == 0) {
    const auto reward = reward_of(program());
    reward->score(samples_of({"child-holds " + held}));
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(run, &status, 0), run);
  ASSERT_TRUE(WIFSIGNALED(status));
  // Nobody writes to it any more as soon as the worker's own process has ended.
  pollfd closed{reader, POLLIN, 0};
  EXPECT_EQ(::poll(&closed, 1, 100'000), 1);
  EXPECT_NE(closed.revents & POLLHUP, 0);
  ::close(reader);
}

TEST(ProcessReward, FailsSamplesOfAProgramThatEndsAtOnce) {
  ProcessOptions options;
  options.command = {"false"};
  const auto scores = reward_of(options)->score(samples_of({"a", "b"}));
  for (const Score& score : scores)
    EXPECT_NE(score.error.value_or("").find("exit status 1"), std::string::npos);
}

TEST(ProcessReward, AProgramThatEndsBeforeItAnswersIsNotStartedForEver) {
  ProcessOptions options;
  options.command = {"false"};
  const std::vector<Sample> samples = samples_of({"a", "b", "c", "d", "e", "f"});
  EXPECT_THAT(testing::message_of([&] { reward_of(options)->score(samples); }),
              AllOf(HasSubstr("rl.reward.command: 'false' was started "),
                    HasSubstr(" times and never answered; the last time it ended (exit status 1); "
                              "try it by hand")));
  options.failed = -1;
  for (const Score& score : reward_of(options)->score(samples)) EXPECT_EQ(score.reward, -1);
}

}  // namespace
}  // namespace heddle::reward
