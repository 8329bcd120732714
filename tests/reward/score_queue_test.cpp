#include "reward/score_queue.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "base/errors.h"
#include "testing/paths.h"
#include "testing/temporary_directory.h"

namespace heddle::reward {
namespace {

RewardOptions program(std::int64_t workers) {
  RewardOptions options;
  options.process.command = {testing::built_path("tests/reward/heddle_reward_worker")};
  options.process.workers = workers;
  options.process.timeout_s = 100;
  return options;
}

Sample sample_of(const std::string& completion) {
  Sample sample;
  sample.completion = completion;
  return sample;
}

/// The next scores, by number.
std::map<std::uint64_t, Score> take(ScoreQueue& queue, std::size_t count) {
  std::map<std::uint64_t, Score> scores;
  while (scores.size() < count) {
    for (ScoreQueue::Scored& scored : queue.take(std::chrono::milliseconds(100)))
      scores[scored.number] = std::move(scored.score);
  }
  return scores;
}

TEST(ScoreQueue, EachSampleGetsItsOwnScore) {
  ScoreQueue queue(program(3));
  std::map<std::uint64_t, double> expected;
  for (std::size_t k = 10; k < 60; ++k)
    expected[queue.submit(sample_of(std::string(k, 'a')))] = static_cast<double>(k);
  for (const auto& [number, score] : take(queue, expected.size())) {
    EXPECT_FALSE(score.error);
    EXPECT_EQ(score.reward, expected.at(number));
  }
  EXPECT_TRUE(queue.take(std::chrono::milliseconds(0)).empty());
}

TEST(ScoreQueue, SlowSamplesHoldUpNoOthers) {
  const testing::TemporaryDirectory folder;
  const std::string file = (folder.path() / "made").string();
  ScoreQueue queue(program(2));
  const std::uint64_t waits = queue.submit(sample_of("wait-for " + file));
  const std::uint64_t makes = queue.submit(sample_of("make " + file));
  EXPECT_FALSE(take(queue, 1).at(makes).error);
  EXPECT_FALSE(take(queue, 1).at(waits).error);
}

TEST(ScoreQueue, ItsEndGivesUpWhatIsUnderWay) {
  const testing::TemporaryDirectory folder;
  {
    RewardOptions options = program(1);
    options.process.timeout_s = 3600;
    ScoreQueue queue(options);
    queue.submit(sample_of("make " + (folder.path() / "before").string()));
    take(queue, 1);
    queue.submit(sample_of("sleep"));
    queue.submit(sample_of("make " + (folder.path() / "after").string()));
  }
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "before"));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "after"));
}

TEST(ScoreQueue, SaysWhyNothingCanBeJudged) {
  RewardOptions options = program(2);
  options.process.command = {"/no/such/program"};
  ScoreQueue queue(options);
  queue.submit(sample_of("a"));
  EXPECT_THROW(take(queue, 1), ConfigError);
  EXPECT_THROW(ScoreQueue{program(0)}, ConfigError);
  EXPECT_THROW(ScoreQueue{RewardOptions()}, ConfigError);
}

}  // namespace
}  // namespace heddle::reward
