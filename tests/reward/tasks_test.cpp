#include <map>
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "reward/environment.h"
#include "reward/verifiers.h"

namespace heddle::reward {
namespace {

constexpr std::uint64_t kSeed = 7;

TEST(Tasks, MakeTheSameRowsAgainAndOthersForOtherSeeds) {
  for (const std::string& name : task_names()) {
    const auto task = make_task(name, {}, "test"), again = make_task(name, {}, "test");
    std::set<std::string> prompts;
    int differing = 0;
    for (std::uint64_t index = 0; index < 50; ++index) {
      const Row row = task->row(kSeed, 49 - index), same = again->row(kSeed, 49 - index);
      EXPECT_EQ(row.prompt, same.prompt) << name;
      EXPECT_EQ(row.truth, same.truth) << name;
      const Row other = task->row(kSeed + 1, 49 - index);
      differing += other.prompt != row.prompt || other.truth != row.truth ? 1 : 0;
      prompts.insert(row.prompt + row.truth.dump());
    }
    EXPECT_GT(differing, 40) << name;
    EXPECT_GT(prompts.size(), 25u) << name;
  }
}

TEST(Tasks, JudgeTheirOwnAnswersRight) {
  for (const char* name : {"arithmetic", "copy", "modular_addition", "reverse_string"}) {
    const auto task = make_task(name, {}, "test");
    for (std::uint64_t index = 0; index < 100; ++index) {
      const Row row = task->row(kSeed, index);
      const auto episode = task->environment();
      EXPECT_EQ(episode->reset(1, row), row.prompt);
      const std::string answer =
          row.truth.is_string() ? row.truth.get<std::string>() : row.truth.dump();
      const Step step = episode->step(answer + "\nand more");
      EXPECT_EQ(step.reward, row.truth.is_string() ? 1 : step.reward) << row.prompt;
      EXPECT_TRUE(step.done);
      EXPECT_EQ((episode->reset(1, row), episode->step(answer)).reward, 1) << row.prompt << answer;
      EXPECT_EQ((episode->reset(1, row), episode->step("zebra")).reward, 0) << row.prompt;
    }
  }
}

TEST(Tasks, ArithmeticIsRight) {
  const auto task = make_task("arithmetic", Json::parse(R"({"terms": 3, "largest": 9})"), "test");
  for (std::uint64_t index = 0; index < 200; ++index) {
    const Row row = task->row(kSeed, index);
    long a = 0, b = 0, c = 0;
    char first = 0, second = 0;
    ASSERT_EQ(std::sscanf(row.prompt.c_str(), "%ld %c %ld %c %ld =", &a, &first, &b, &second, &c),
              5);
    const auto apply = [](long x, char operation, long y) {
      return operation == '+' ? x + y : operation == '-' ? x - y : x * y;
    };
    const long value = second == '*' && first != '*' ? apply(a, first, b * c)
                                                     : apply(apply(a, first, b), second, c);
    EXPECT_EQ(row.truth.get<long>(), value) << row.prompt;
  }
}

TEST(Tasks, CopyHasALongTail) {
  const auto task = make_task("copy", Json::parse(R"({"mean": 16, "longest": 1000})"), "test");
  double total = 0;
  std::size_t longest = 0;
  for (std::uint64_t index = 0; index < 4000; ++index) {
    const std::size_t length = task->row(kSeed, index).truth.get<std::string>().size();
    total += static_cast<double>(length);
    longest = std::max(longest, length);
  }
  EXPECT_NEAR(total / 4000, 16, 1.5);
  EXPECT_GT(longest, 80u);
}

TEST(Tasks, ReverseStringGivesPartOfTheRewardIfAsked) {
  const auto task =
      std::shared_ptr(make_task("reverse_string", Json::parse(R"({"partial": true})"), "t"));
  Sample sample;
  sample.truth = "abcd";
  sample.completion = "abxx";
  const Score score = make_task_verifier(task)->judge(sample);
  EXPECT_DOUBLE_EQ(score.reward, 0.5);
  EXPECT_DOUBLE_EQ(score.parts.at("right"), 0);
}

TEST(Tasks, CountdownTakesAnyExpressionOverItsNumbers) {
  const auto task = std::shared_ptr(make_task("countdown", {}, "test"));
  const auto verifier = make_task_verifier(task);
  const auto judged = [&](const std::string& completion) {
    Sample sample;
    sample.completion = completion;
    sample.truth = 24;
    sample.meta = Json::parse(R"({"numbers": [2, 3, 4]})");
    return verifier->judge(sample).reward;
  };
  for (const char* right :
       {"2*3*4", "4 * (2 * 3)", "2*3*4 = 24", "so \\boxed{3*4*2}", "<answer>(2*3)*4</answer>"})
    EXPECT_EQ(judged(right), 1) << right;
  for (const char* wrong :
       {"24", "2*3*4*1", "2*12", "2+3+4", "2*3*4+0*2", "2**3*4", "", "(2*3*4", "2*3*4/0"})
    EXPECT_EQ(judged(wrong), 0) << wrong;
}

TEST(Tasks, GuessNumberAnswersEachTurn) {
  const auto task =
      make_task("guess_number", Json::parse(R"({"largest": 100, "turns": 7})"), "test");
  EXPECT_TRUE(task->is_multi_turn());
  for (std::uint64_t index = 0; index < 100; ++index) {
    const Row row = task->row(kSeed, index);
    const auto episode = task->environment();
    episode->reset(1, row);
    // Halving finds one of 100 in seven turns.
    long low = 1, high = 100;
    Step step;
    while (!step.done) {
      const long guess = (low + high) / 2;
      step = episode->step("I say " + std::to_string(guess));
      if (step.observation == "\nhigher\n") low = guess + 1;
      if (step.observation == "\nlower\n") high = guess - 1;
    }
    EXPECT_EQ(step.reward, 1);
    EXPECT_FALSE(step.truncated);
  }
  const auto episode = task->environment();
  episode->reset(1, task->row(kSeed, 0));
  for (int turn = 0; turn < 6; ++turn)
    EXPECT_EQ(episode->step("?").observation, "\nnot a number\n");
  const Step last = episode->step("?");
  EXPECT_TRUE(last.done && last.truncated && last.reward == 0);
  EXPECT_THROW(episode->step("1"), InternalError);
}

TEST(Tasks, AnswerTheTurnsOfASample) {
  RewardOptions options;
  options.verifiers = {
      {.verifier = "guess_number", .weight = 2, .parameters = Json::parse(R"({"turns": 3})")},
      {.verifier = "length",
       .weight = 0,
       .parameters = Json::parse(R"({"target": 9, "max": 99})")}};
  const auto reward = make_reward(options);
  Sample sample;
  sample.truth = 60;
  const auto judged = [&](const std::string& completion) {
    sample.completion = completion;
    Score score = reward->score(std::vector{sample})[0];
    sample.turns.push_back({completion, score.observation.value_or("")});
    return score;
  };
  const Score low = judged("50"), high = judged("75"), right = judged("60");
  EXPECT_EQ(low.observation, "\nhigher\n");
  EXPECT_EQ(high.observation, "\nlower\n");
  EXPECT_EQ(high.reward, 0);
  EXPECT_EQ(right.observation, std::nullopt);
  EXPECT_EQ(right.reward, 2);
  EXPECT_EQ(right.parts.at("guess_number"), 1);
  sample.turns.resize(2);
  EXPECT_EQ(judged("61").reward, 0);
  EXPECT_EQ(sample.turns.back().observation, "") << "the third turn is the last";
  sample = {};
  sample.truth = "sixty";
  EXPECT_THAT(judged("60").error.value_or(""), ::testing::HasSubstr("the answer must be a number"));
}

TEST(Tasks, AreVerifiersByName) {
  Sample sample;
  sample.truth = "abc";
  sample.completion = "abx";
  EXPECT_NEAR(make_verifier("copy", Json::parse(R"({"partial": true})"), "t")->judge(sample).reward,
              2. / 3, 1e-12);
  EXPECT_THROW(make_verifier("copy", Json::parse(R"({"turns": 3})"), "t"), ConfigError);
}

TEST(Tasks, RefuseUnknownNamesAndParameters) {
  EXPECT_THROW(make_task("chess", {}, "rl.task"), ConfigError);
  EXPECT_THROW(make_task("copy", Json::parse(R"({"meen": 3})"), "rl.task"), ConfigError);
  EXPECT_THROW(make_task("arithmetic", Json::parse(R"({"operations": "/"})"), "rl.task"),
               ConfigError);
}

}  // namespace
}  // namespace heddle::reward
