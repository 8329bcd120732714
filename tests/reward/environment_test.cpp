#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/files.h"
#include "reward/reward.h"
#include "reward/score_queue.h"
#include "reward/wire.h"
#include "testing/paths.h"
#include "testing/temporary_directory.h"

namespace heddle::reward {
namespace {

RewardOptions program(std::int64_t workers) {
  RewardOptions options;
  options.environment.command = {testing::built_path("tests/reward/heddle_reward_worker")};
  options.environment.timeout_s = 100;
  options.environment.workers = workers;
  return options;
}

Sample opening(const std::string& id, Json truth, Json meta = nullptr) {
  return {.id = id, .truth = std::move(truth), .meta = std::move(meta), .ask = Ask::kOpening};
}
Sample action(const std::string& id, const std::string& text) {
  return {.id = id, .completion = text};
}
Sample closing(const std::string& id) { return {.id = id, .ask = Ask::kClosing}; }

TEST(Environment, PlaysEpisodesSideBySide) {
  const auto environment = make_reward(program(2));
  const std::vector<Sample> openings = {opening("a", 5), opening("b", 6), opening("c", 7)};
  std::vector<Score> scores = environment->score(openings);
  EXPECT_EQ(scores[0].observation, "start 5");
  EXPECT_EQ(scores[1].observation, "start 6");
  EXPECT_EQ(scores[2].observation, "start 7");
  const std::vector<Sample> turns = {action("c", "1"), action("a", "2")};
  scores = environment->score(turns);
  EXPECT_EQ(scores[0].observation, "6");
  EXPECT_EQ(scores[1].observation, "3");
  const std::vector<Sample> last = {action("a", "3")};
  scores = environment->score(last);
  EXPECT_FALSE(scores[0].goes_on());
  EXPECT_EQ(scores[0].reward, 1);
  // An episode that is over is no more.
  scores = environment->score(last);
  EXPECT_TRUE(scores[0].error);
}

TEST(Environment, ClosesWhatIsOverAndWhatIsGivenUp) {
  const testing::TemporaryDirectory folder;
  const std::string notes = folder / "notes";
  const Json meta = {{"turns", 2}, {"notes", notes}};
  const auto environment = make_reward(program(1));
  const std::vector<Sample> openings = {opening("over", nullptr, meta),
                                        opening("given up", nullptr, meta)};
  for (const Score& score : environment->score(openings)) EXPECT_FALSE(score.goes_on());
  for (int turn = 0; turn < 2; ++turn) {
    const std::vector<Sample> turns = {action("over", "x")};
    const Score score = environment->score(turns)[0];
    EXPECT_EQ(score.goes_on(), turn == 0);
    EXPECT_EQ(score.reward, turn == 0 ? 0.25 : 1);
  }
  EXPECT_EQ(files::read(notes), "++-");
  const std::vector<Sample> closings = {closing("given up"), closing("over"), closing("other")};
  environment->score(closings);
  EXPECT_EQ(files::read(notes), "++--");
}

TEST(Environment, LosesTheEpisodesOfAWorkerThatEnds) {
  RewardOptions options = program(1);
  const std::vector<Sample> openings = {opening("a", 5), opening("b", 5)};
  const std::vector<Sample> fatal = {action("a", "die")}, other = {action("b", "1")};
  {
    const auto environment = make_reward(options);
    environment->score(openings);
    const Score failed = environment->score(fatal)[0];
    EXPECT_NE(failed.error.value_or("").find("exit status 3"), std::string::npos);
    EXPECT_FALSE(failed.is_lost);
    const Score lost = environment->score(other)[0];
    EXPECT_EQ(lost.error, "the worker that had its episode has ended");
    EXPECT_TRUE(lost.is_lost);
    EXPECT_EQ(environment->score(openings)[1].observation, "start 5");
    EXPECT_EQ(environment->score(other)[0].observation, "4");
  }
  options.environment.failed = -1;
  const auto environment = make_reward(options);
  environment->score(openings);
  EXPECT_EQ(environment->score(fatal)[0].reward, -1);
  EXPECT_EQ(environment->score(other)[0].reward, -1);
}

TEST(Environment, LosesTheEpisodesOfAWorkerThatEndsWhenItClosesOne) {
  const auto environment = make_reward(program(1));
  std::vector<Sample> openings = {opening("a", 0), opening("b", 0)};
  for (Sample& sample : openings) sample.meta = {{"dies_at_close", true}, {"turns", 1}};
  environment->score(openings);
  const std::vector<Sample> last = {action("a", "x")}, other = {action("b", "x")};
  // Its own score has come before; the other one is not asked about in a worker that knows nothing.
  EXPECT_EQ(environment->score(last)[0].reward, 1);
  EXPECT_TRUE(environment->score(other)[0].is_lost);
}

TEST(Environment, NoEpisodeIsToBlameForAWorkerThatEndedUnasked) {
  const testing::TemporaryDirectory folder;
  const std::string pipe = (folder / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const auto environment = make_reward(program(1));
  const std::vector<Sample> openings = {opening("a", 5), opening("b", 5)};
  const std::vector<Sample> last = {action("a", "last-words " + pipe)};
  const std::vector<Sample> after = {opening("c", 7), action("b", "1"), action("c", "1")};
  environment->score(openings);
  EXPECT_EQ(environment->score(last)[0].observation, "on");
  // Opens when the worker does, and has an end when the worker has ended.
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_CLOEXEC);
  char byte = 0;
  EXPECT_EQ(::read(reader, &byte, 1), 0);
  ::close(reader);
  EXPECT_EQ(environment->score({&after[0], 1})[0].observation, "start 7");
  EXPECT_TRUE(environment->score({&after[1], 1})[0].is_lost);
  EXPECT_EQ(environment->score({&after[2], 1})[0].observation, "6");
}

TEST(Environment, EpisodesStayWithTheirThread) {
  ScoreQueue queue(program(3));
  const auto answers = [&](std::size_t count) {
    std::map<std::uint64_t, Score> scores;
    while (scores.size() < count) {
      for (auto& scored : queue.take(std::chrono::seconds(20)))
        scores[scored.number] = std::move(scored.score);
    }
    return scores;
  };
  std::map<std::uint64_t, std::string> expected;
  for (int i = 0; i < 7; ++i)
    expected[queue.submit(opening(std::to_string(i), 50 + i))] = "start " + std::to_string(50 + i);
  for (int turn = 1; turn < 6; ++turn) {
    for (int i = 0; i < 7; ++i)
      expected[queue.submit(action(std::to_string(i), "2"))] = std::to_string(50 + i - 2 * turn);
  }
  for (int i = 0; i < 7; ++i) queue.submit(closing(std::to_string(i)));
  for (const auto& [number, score] : answers(expected.size()))
    EXPECT_EQ(score.observation, expected.at(number)) << number;
  EXPECT_EQ(answers(0).size(), 0U);
}

TEST(Environment, RefusesAnswersThatAreNone) {
  const auto error = [](const Json& answer) {
    return episode_from_wire(answer, Ask::kScore).error.value_or("");
  };
  EXPECT_EQ(error({{"observation", "on"}}), "");
  EXPECT_EQ(error({{"reward", 1}, {"done", true}}), "");
  EXPECT_NE(error({{"done", true}}).find("'reward'"), std::string::npos);
  EXPECT_NE(error({{"truncated", true}}).find("'reward'"), std::string::npos);
  EXPECT_NE(error({{"reward", 1}}).find("not 'done'"), std::string::npos);
  EXPECT_NE(error({{"reward", 1}, {"done", 1}}).find("'done'"), std::string::npos);
  EXPECT_NE(error({{"observation", "a"}, {"messages", {{{"role", "tool"}}}}}).find("give one"),
            std::string::npos);
  EXPECT_NE(error({{"messages", Json::array()}}).find("'messages'"), std::string::npos);
  EXPECT_NE(error({{"messages", "text"}}).find("'messages'"), std::string::npos);
  EXPECT_NE(error("text").find("object"), std::string::npos);
  const Score cut =
      episode_from_wire({{"reward", 0}, {"truncated", true}, {"observation", "x"}}, Ask::kScore);
  EXPECT_TRUE(cut.is_truncated);
  EXPECT_FALSE(cut.goes_on());
  for (const Json& rest : {Json{{"observation", ""}}, Json{{"messages", Json::array()}}}) {
    Json over = {{"reward", 1}, {"done", true}};
    over.update(rest);
    EXPECT_EQ(error(over), "") << "nobody reads what comes after the end";
  }
  EXPECT_NE(episode_from_wire({{"done", true}, {"reward", 1}}, Ask::kOpening)
                .error.value_or("")
                .find("'done' is for op step"),
            std::string::npos);
  EXPECT_EQ(episode_from_wire({{"done", false}}, Ask::kOpening).error, std::nullopt);
  EXPECT_EQ(episode_from_wire(Json::object(), Ask::kOpening).error, std::nullopt);
  EXPECT_TRUE(episode_from_wire({{"observation", 3}}, Ask::kOpening).error);
}

}  // namespace
}  // namespace heddle::reward
