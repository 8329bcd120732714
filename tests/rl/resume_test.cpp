// Runs of `heddle rl` that go on from a checkpoint with groups that no step has consumed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

#include "base/text.h"
#include "rl/rl_fixture.h"

namespace heddle {
namespace {

/// Completions of many lengths, so that some groups run at each update and others wait.
const Words kAhead = {"rl.mode=async",       "rl.max_staleness=2",
                      "train.max_steps=8",   "rollout.max_sequences=12",
                      "rollout.stop=[e, a]", "rollout.max_new_tokens=24",
                      "optim.lr=1e-2"};

class ResumeTest : public RlTest {
 protected:
  config::RunConfig ahead(const std::string& name, const Words& more = {}) const {
    Words all = kAhead;
    all.insert(all.end(), more.begin(), more.end());
    return run(name, all);
  }
  rl::LedgerState ledger(const std::string& name) const {
    return rl::Ledger(dir_ / name / "ledger.log").state();
  }
  /// Times that each prompt was dispatched.
  std::map<std::int64_t, std::int64_t> dispatches(const std::string& name) const {
    std::map<std::int64_t, std::int64_t> times;
    for (const std::string& line : text::split(files::read(dir_ / name / "ledger.log"), '\n')) {
      if (line.find("\"dispatched\"") == std::string::npos) continue;
      const auto record = nlohmann::json::parse(line.substr(line.find('{'))).at("dispatched");
      ++times[record.at("cursor").get<std::int64_t>()];
    }
    return times;
  }
  /// Stops a run after its third step; where the ledger then stands. Some groups are finished and
  /// some run.
  rl::LedgerState stopped(const std::string& name) const {
    train(ahead(name), 3);
    rl::LedgerState state = ledger(name);
    EXPECT_GT(state.completed.size(), 1u) << name;
    EXPECT_LT(state.completed.size(), state.pending.size()) << name;
    return state;
  }
};

TEST_F(ResumeTest, ARunThatBeginsAnewLeavesNoGroupsOfTheOneBefore) {
  const std::filesystem::path file = dir_ / "anew" / "groups.jsonl";
  const Words settings = {"rl.groups_every=1", "train.max_steps=2"};
  train(run("anew", settings));
  const std::string first = files::read(file);
  // A disk that was full, or a kill, leaves it so.
  files::write_atomically(file, first.substr(0, first.size() - 20));
  std::filesystem::remove_all(dir_ / "anew" / "checkpoints");
  train(run("anew", settings));
  EXPECT_EQ(files::read(file), first);
}

// 24 prompts once, in batches that change in the middle.
TEST_F(ResumeTest, BatchesOfAnotherSizeEndWithThePrompts) {
  const auto steps = [&](const std::string& name, const char* groups, std::int64_t stop) {
    config::RunConfig config = run(name, {std::string("rl.groups_per_step=") + groups,
                                          "train.epochs=1", "rl.algorithm.advantage=gae"});
    config.train.max_steps = 0;
    return train(config, stop).steps;
  };
  steps("larger", "2", 6);
  const auto larger = steps("larger", "4", 1000);
  ASSERT_EQ(larger.size(), 3u);
  EXPECT_EQ(larger.back().step, 9);
  steps("smaller", "4", 3);
  const auto smaller = steps("smaller", "2", 1000);
  ASSERT_EQ(smaller.size(), 6u);
  EXPECT_EQ(smaller.back().step, 9);
  EXPECT_EQ(ledger("larger").consumed, 24);
  EXPECT_EQ(ledger("smaller").consumed, 24);
}

TEST_F(ResumeTest, FinishedGroupsAreConsumedAndOthersGeneratedAnew) {
  const rl::LedgerState before = stopped("parts");
  EXPECT_EQ(train(ahead("parts")).steps.size(), 5u);
  const auto times = dispatches("parts");
  for (const auto& [cursor, dispatch] : before.pending)
    EXPECT_EQ(times.at(cursor), before.completed.contains(cursor) ? 1 : 2) << cursor;
  const rl::LedgerState after = ledger("parts");
  EXPECT_EQ(after.consumed, 32);
  for (const std::int64_t cursor : before.completed)
    EXPECT_FALSE(after.pending.contains(cursor)) << cursor;
  // Each is consumed or pending: the ledger refuses a second time.
  EXPECT_EQ(after.consumed + std::ssize(after.pending), after.next_cursor);
}

TEST_F(ResumeTest, FinishedGroupsThatAreTooOldAreRejected) {
  const rl::LedgerState before = stopped("old");
  // The weights that drew them are older than those of the checkpoint.
  const Reports reports = train(ahead("old", {"rl.max_staleness=0", "rl.stale_attempts=1"}));
  EXPECT_EQ(reports.steps.size(), 5u);
  EXPECT_EQ(reports.steps.front().metrics.at("rejected_stale"),
            static_cast<double>(before.completed.size()));
  EXPECT_GT(reports.steps.front().metrics.at("rejected_stale_tokens"), 0);
  const rl::LedgerState after = ledger("old");
  EXPECT_EQ(after.rejected.at(rl::Rejection::kStale), std::ssize(before.completed));
  EXPECT_EQ(after.consumed, 32);
  EXPECT_EQ(after.consumed + std::ssize(before.completed) + std::ssize(after.pending),
            after.next_cursor);
}

TEST_F(ResumeTest, FinishedGroupsOfOtherSettingsAreGeneratedAnew) {
  const rl::LedgerState before = stopped("other");
  ::testing::internal::CaptureStderr();
  train(ahead("other", {"rollout.temperature=0.9"}));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::HasSubstr(fmt::format("{} finished groups of the checkpoint are generated "
                                               "anew, because rollout.temperature changed",
                                               before.completed.size())));
  const auto times = dispatches("other");
  for (const auto& [cursor, dispatch] : before.pending) EXPECT_EQ(times.at(cursor), 2) << cursor;
  EXPECT_EQ(ledger("other").consumed, 32);
}

TEST_F(ResumeTest, FinishedGroupsOfPromptsThatBecameOthersAreGeneratedAnew) {
  // The rows are the same, what is made of them is not: tokens, or what rewards compare with.
  const auto chat = dir_ / "chat.jinja";
  files::write_atomically(chat, "{% for m in messages %}{{ m.content }}{% endfor %}");
  for (const std::string& change :
       {"data.chat_template=" + chat.string(), std::string("data.fields.answer=prompt")}) {
    const std::string name = "rows-" + change.substr(5, 4);
    const rl::LedgerState before = stopped(name);
    ::testing::internal::CaptureStderr();
    train(ahead(name, {change}));
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                ::testing::HasSubstr("because what data.* makes of the prompts changed"))
        << change;
    const auto times = dispatches(name);
    for (const auto& [cursor, dispatch] : before.pending) EXPECT_EQ(times.at(cursor), 2) << cursor;
  }
}

TEST_F(ResumeTest, AnotherRunGoesOnWithTheFinishedGroups) {
  const rl::LedgerState before = stopped("first");
  const auto from = dir_ / "first" / "checkpoints" / "step-00000003";
  EXPECT_EQ(train(ahead("second", {"train.resume=" + from.string()})).steps.size(), 5u);
  const auto times = dispatches("second");
  for (const auto& [cursor, dispatch] : before.pending)
    EXPECT_EQ(times.contains(cursor), !before.completed.contains(cursor)) << cursor;
  EXPECT_EQ(ledger("second").consumed, 20);
}

TEST_F(ResumeTest, ADeterministicRunThatFinishesItsGroupsContinuesBitForBit) {
  const Words settings = {"rl.deterministic=true", "rl.update_mode=wait"};
  const Reports whole = train(ahead("whole", settings));
  train(ahead("parts", settings), 3);
  // Two batches are ready at each update, and nothing runs.
  const rl::LedgerState state = ledger("parts");
  EXPECT_EQ(state.completed.size(), 8u);
  EXPECT_EQ(state.pending.size(), 8u);
  const Reports rest = train(ahead("parts", settings));
  ASSERT_EQ(rest.steps.size(), 5u);
  EXPECT_EQ(weights("whole"), weights("parts"));
  EXPECT_EQ(dispatches("whole"), dispatches("parts"));
  // Groups that were finished before the checkpoint are told of after it.
  for (std::size_t i = 0; i < 5; ++i) {
    for (const char* figure : {"gen_tokens", "gen_batch", "groups_all_wrong"}) {
      EXPECT_EQ(rest.steps[i].metrics.at(figure), whole.steps[i + 3].metrics.at(figure))
          << figure << " " << i;
    }
  }
}

TEST_F(ResumeTest, WhatTheLastStepLeavesOfABatchIsConsumedWhenTheRunGoesOn) {
  const Words settings = {"rl.sync_every=3", "rl.max_staleness=1", "rl.update_mode=wait"};
  const auto limited = [&](const char* steps) {
    Words all = settings;
    all.push_back(std::string("train.max_steps=") + steps);
    return ahead("longer", all);
  };
  EXPECT_EQ(train(limited("2")).steps.size(), 2u);
  const rl::LedgerState before = ledger("longer");
  EXPECT_EQ(before.consumed, 8);
  // A third of the first batch, and the groups of the next one.
  EXPECT_EQ(before.completed.size(), 16u);
  EXPECT_EQ(train(limited("6")).steps.size(), 4u);
  const auto times = dispatches("longer");
  for (const std::int64_t cursor : before.completed) EXPECT_EQ(times.at(cursor), 1) << cursor;
  // Eight and sixteen are one batch of three steps; the last step takes a third of twelve others.
  EXPECT_EQ(ledger("longer").consumed, 8 + 16 + 4);
}

}  // namespace
}  // namespace heddle
