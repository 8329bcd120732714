// Rewards of runs: judged while the model generates, and what happens where there are none.
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "comm/mesh.h"
#include "comm/ranks.h"
#include "rl/judge.h"
#include "rl/rl_fixture.h"
#include "train/vocabulary.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;

class JudgingTest : public RlTest {
 protected:
  /// Rows in their order, judged by the worker program.
  config::RunConfig judged(const std::string& name, const std::vector<nlohmann::json>& rows,
                           Words more) const {
    std::ofstream file(dir_ / "rows.jsonl");
    for (const nlohmann::json& row : rows) file << row << "\n";
    Words all = {"data.train=" + (dir_ / "rows.jsonl").string(),
                 "data.shuffle=false",
                 "rl.groups_per_step=2",
                 "rl.samples_per_group=4",
                 "train.max_steps=1",
                 "rl.reward.workers=5",
                 "rl.reward.timeout_s=20"};
    all.insert(all.end(), more.begin(), more.end());
    return episodes(name, all);
  }
  std::string path(const char* name) const { return (dir_ / name).string(); }
};

template <class Error>
std::string message_of(const config::RunConfig& config) {
  std::atomic<bool> stop = false;
  Reports reports(1000, stop);
  try {
    train::Trainer(config, reports, stop, nullptr, rl::subject).run();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST_F(JudgingTest, OtherPromptsAreGeneratedMeanwhile) {
  // The completions of the first prompt are judged once one of the second is, which the engine has
  // no room for until the first have been drawn.
  const config::RunConfig run = judged("meanwhile",
                                       {{{"prompt", "a"}, {"meta", {{"waits_for", path("made")}}}},
                                        {{"prompt", "b"}, {"meta", {{"makes", path("made")}}}}},
                                       {"rollout.max_sequences=4"});
  const Reports reports = train(run);
  ASSERT_EQ(reports.steps.size(), 1U);
  EXPECT_EQ(reports.steps.front().metrics.at("reward_mean"), 1);
  EXPECT_EQ(reports.steps.front().metrics.at("rejected_failed"), 0);
}

TEST_F(JudgingTest, TurnsOfAGroupDoNotWaitForEachOther) {
  const config::RunConfig run =
      judged("race",
             {{{"prompt", "a"}, {"meta", {{"race", path("a")}}}},
              {{"prompt", "b"}, {"meta", {{"race", path("b")}}}}},
             {"rl.reward.workers=8", "rl.groups_every=1", "rollout.stop=[e, a]"});
  const Reports reports = train(run);
  ASSERT_EQ(reports.steps.size(), 1U);
  EXPECT_EQ(reports.steps.front().metrics.at("rejected_failed"), 0);
  // Each group has one completion of two turns.
  std::ifstream log(dir_ / "race" / "groups.jsonl");
  std::string line;
  ASSERT_TRUE(std::getline(log, line));
  const auto row = nlohmann::json::parse(line);
  std::size_t turns = 0;
  for (const auto& sample : row.at("samples"))
    turns += sample.value("turns", nlohmann::json::array()).size();
  EXPECT_EQ(turns, 1U) << line;
}

TEST_F(JudgingTest, RunsWhoseRewardsAllFailEnd) {
  std::vector<nlohmann::json> rows;
  for (int i = 0; i < 4; ++i)
    rows.push_back({{"prompt", "say"}, {"meta", {{"fails", "the compiler is not there"}}}});
  const std::string message = message_of<Error>(judged("fails", rows, {}));
  EXPECT_THAT(message, HasSubstr("none of the last 8 prompts could be judged"));
  EXPECT_THAT(message, HasSubstr("the compiler is not there"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "fails" / "final"));

  const Reports reports = train(judged(
      "failed",
      {{{"prompt", "a"}, {"meta", {{"turns", 1}}}}, {{"prompt", "b"}, {"meta", {{"fails", "x"}}}}},
      {"rl.reward.failed=-0.5"}));
  // An error of the program itself has the reward of a failure, too.
  EXPECT_EQ(reports.steps.front().metrics.at("reward_mean"), 0.25);
  EXPECT_EQ(reports.steps.front().metrics.at("rejected_failed"), 0);
}

TEST_F(JudgingTest, APartThatAProgramTellsIsAFigureOfItsOwn) {
  const std::string program = path("tells");
  std::ofstream(program)
      << "#!/bin/sh\nexec sed -u 's/.*\"id\": *\"\\([^\"]*\\)\".*/{\"id\":\"\\1\","
         "\"reward\":1,\"parts\":{\"win\":3}}/'\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  const Reports reports = train(run("program", {"train.max_steps=1", "rl.reward.verifiers={}",
                                                "rl.reward.command=[" + program + "]"}));
  EXPECT_EQ(reports.steps.front().metrics.at("reward_mean"), 1);
  EXPECT_EQ(reports.steps.front().metrics.at("reward_win"), 3);
  const Reports alone = train(run("verifier", {"train.max_steps=1"}));
  EXPECT_EQ(alone.steps.front().metrics.find("reward_contains"), nullptr);
}

TEST_F(JudgingTest, AllRanksEndAsTheOneThatAsksDoes) {
  const config::RunConfig wrong =
      judged("ranks", {{{"prompt", "a"}}}, {"rl.reward.command=[/no/such/program]"});
  const auto tokenizer = train::load_tokenizer(wrong).tokenizer;
  std::vector<std::string> reasons(2);
  const auto errors = testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh({1, 1, 1, 2, 1}, world);
    rl::Judge judge(wrong, *tokenizer, /*in_order=*/false, mesh.world_group());
    rl::Group group;
    group.trajectories.resize(1);
    judge.submit({}, group, 0);
    try {
      while (judge.pending() > 0) judge.take(/*waits=*/true);
    } catch (const ConfigError& error) {
      reasons[static_cast<std::size_t>(world->rank())] = error.what();
    }
  });
  EXPECT_THAT(errors, ::testing::Each(""));
  EXPECT_THAT(reasons, ::testing::Each(HasSubstr("'/no/such/program' cannot be started")));
}

TEST_F(JudgingTest, RowsWithoutWhatRewardsNeedAreNamed) {
  std::ofstream(dir_ / "prompts.jsonl") << R"({"prompt": "a", "answer": "k"})"
                                        << "\n"
                                        << R"({"prompt": "b", "solution": "k"})"
                                        << "\n";
  std::string message = message_of<DataError>(run("no-answer"));
  EXPECT_THAT(message, HasSubstr("prompts.jsonl:2: the row has no 'answer'"));
  EXPECT_THAT(message, HasSubstr("verifier contains"));
  EXPECT_THAT(message, HasSubstr("prompt, solution"));
  message = message_of<DataError>(judged("no-field", {{{"prompt", "a"}, {"answer", "k"}}},
                                         {"data.fields.answer=reward_model.ground_truth"}));
  EXPECT_THAT(message, HasSubstr("rows.jsonl:1: the row has no 'reward_model.ground_truth'"));
}

TEST_F(JudgingTest, RewardsGetWhateverARowHas) {
  // The worker reads the sample's meta, which are the fields that nothing else reads.
  const Reports reports = train(
      judged("columns", {{{"prompt", "a"}, {"turns", 1}}, {{"prompt", "b"}, {"turns", 1}}}, {}));
  EXPECT_EQ(reports.steps.front().metrics.at("reward_mean"), 1);
  // A row names its verifier in a field of its own, also beside `meta`.
  const nlohmann::json alone = {{"prompt", "a"}, {"verifier", "regex"}};
  nlohmann::json beside = alone;
  beside["meta"] = {{"difficulty", 1}};
  const Reports named = train(judged("named", {alone, beside},
                                     {"rl.reward.command=[]", "rl.reward.verifiers.row=1",
                                      "rl.reward.parameters.row='{\"pattern\": \"(?s).*\"}'"}));
  EXPECT_EQ(named.steps.front().metrics.at("reward_mean"), 1);
  EXPECT_EQ(named.steps.front().metrics.at("rejected_failed"), 0);
}

TEST_F(JudgingTest, RowsThatNoCompletionCouldAnswerAreNamedBeforeTheRun) {
  std::ofstream(dir_ / "prompts.jsonl") << R"({"prompt": "a", "answer": "7"})"
                                        << "\n"
                                        << R"({"prompt": "b", "answer": "seven"})"
                                        << "\n";
  const Words numeric = {"rl.reward.verifiers.contains=0", "rl.reward.verifiers.numeric=1"};
  EXPECT_THAT(message_of<DataError>(run("truth", numeric)),
              HasSubstr("prompts.jsonl:2: no completion could be judged: numeric: the truth must "
                        "be a number, found \"seven\""));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "truth" / "final"));
  // Rows of data.eval, too, which would otherwise end the run at its first evaluation.
  std::ofstream(dir_ / "held_out.jsonl") << R"({"prompt": "a", "answer": "k", "verifier": "exakt"})"
                                         << "\n";
  Words held_out = {"data.eval=" + path("held_out.jsonl"), "rl.reward.verifiers.row=1"};
  EXPECT_THAT(message_of<DataError>(run("named", held_out)),
              HasSubstr("prompts.jsonl:1: no completion could be judged: row: the row has no "));
  std::ofstream(dir_ / "prompts.jsonl") << R"({"prompt": "a", "answer": "k", "verifier": "exact"})"
                                        << "\n";
  EXPECT_THAT(message_of<DataError>(run("eval", held_out)),
              HasSubstr("held_out.jsonl:1: no completion could be judged: row: "));
}

TEST_F(JudgingTest, HeldOutPromptsWithoutARewardAreLeftOut) {
  const std::vector<nlohmann::json> rows = {{{"prompt", "a"}, {"meta", {{"turns", 1}}}},
                                            {{"prompt", "b"}, {"meta", {{"turns", 1}}}}};
  const auto held_out = [&](const char* name, const std::vector<nlohmann::json>& of) {
    std::ofstream file(dir_ / name);
    for (const nlohmann::json& row : of) file << row << "\n";
    return "data.eval=" + (dir_ / name).string();
  };
  const nlohmann::json fails = {{"prompt", "c"}, {"meta", {{"fails", "no compiler"}}}};
  const Reports reports =
      train(judged("some", rows, {held_out("some.jsonl", {fails, rows[0]}), "train.eval_every=1"}));
  ASSERT_EQ(reports.evaluations.size(), 1U);
  EXPECT_EQ(reports.evaluations.front().metrics.at("reward"), 1);
  EXPECT_THAT(message_of<Error>(judged(
                  "none", rows, {held_out("none.jsonl", {fails, fails}), "train.eval_every=1"})),
              HasSubstr("none.jsonl:1: no compiler"));
}

}  // namespace
}  // namespace heddle
