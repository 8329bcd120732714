// Conversations that the chat template renders anew before each turn.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "rl/batch_bytes.h"
#include "rl/experience.h"
#include "rl/rl_fixture.h"
#include "rl/turns.h"
#include "testing/paths.h"

namespace heddle::rl {
namespace {

using ::testing::ElementsAre;
using Tokens = std::vector<std::int32_t>;

class HistoryTest : public RlTest {
 protected:
  void SetUp() override {
    RlTest::SetUp();
    tokenizer_ = data::Tokenizer::load(testing::source_path("examples/tokenizer-4k"));
    prompt_ = encode(kPrompt);
  }
  Tokens encode(const std::string& text) const { return tokenizer_->encode(text); }
  /// Drawn after the prompt, byte by byte, which no text is encoded as.
  Trajectory answered(const std::string& text) const {
    rollout::Completion turn;
    for (const char byte : text) turn.output_ids.push_back(encode(std::string(1, byte)).at(0));
    turn.output_ids.push_back(encode("<|im_end|>").at(0));
    turn.logprobs.assign(turn.output_ids.size(), -0.5);
    turn.weights_versions.assign(turn.output_ids.size(), 3);
    turn.text = text;
    turn.finish_reason = rollout::FinishReason::kStop;
    Trajectory trajectory;
    add_turn(trajectory, std::move(turn), true);
    return trajectory;
  }

  static constexpr const char* kPrompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
  static constexpr const char* kReply =
      "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n";
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  Tokens prompt_;
};

TEST_F(HistoryTest, AContinuationIsAppended) {
  Trajectory trajectory = answered("because");
  const Tokens drawn = trajectory.tokens, reply = encode(kReply);
  EXPECT_NE(drawn, encode("because<|im_end|>"));
  const std::string history = std::string(kPrompt) + "because<|im_end|>" + kReply;
  ASSERT_TRUE(add_history(trajectory, prompt_, encode(history), "and?", *tokenizer_, {100, 200}));
  EXPECT_TRUE(trajectory.forks.empty());
  Tokens all = drawn;
  all.insert(all.end(), reply.begin(), reply.end());
  EXPECT_EQ(trajectory.tokens, all);
  EXPECT_EQ(trajectory.sampled_tokens(), std::ssize(drawn));
  all.insert(all.begin(), prompt_.begin(), prompt_.end());
  EXPECT_EQ(context_of(trajectory, prompt_), all);
  EXPECT_THAT(trajectory.turns, ElementsAre(Turn{"because", "and?"}));
}

TEST_F(HistoryTest, AnythingElseForks) {
  Trajectory trajectory = answered("because");
  const std::int64_t first = std::ssize(trajectory.tokens);
  const Tokens history = encode(std::string(kPrompt) + "shorter<|im_end|>" + kReply);
  ASSERT_TRUE(add_history(trajectory, prompt_, history, "and?", *tokenizer_, {100, 200}));
  ASSERT_EQ(trajectory.forks.size(), 1U);
  EXPECT_EQ(std::ssize(trajectory.tokens), first);
  EXPECT_EQ(context_of(trajectory, prompt_), history);
  const Trajectory second = answered("no");
  rollout::Completion turn;
  turn.output_ids = second.tokens;
  turn.logprobs = second.logprobs;
  turn.weights_versions = second.versions;
  add_turn(trajectory, std::move(turn), true);
  const std::vector<Strand> strands = strands_of(trajectory, prompt_);
  ASSERT_EQ(strands.size(), 2U);
  EXPECT_EQ(strands[0].last, first);
  EXPECT_EQ(strands[1].first, first);
  EXPECT_EQ(strands[1].last, std::ssize(trajectory.tokens));
  EXPECT_EQ(*strands[1].prompt, history);
  // A batch on its way keeps them.
  Batch batch;
  batch.groups = {{.cursor = 1, .trajectories = {trajectory}}};
  EXPECT_EQ(batch_from_bytes(to_bytes(batch)).groups.at(0).trajectories.at(0).forks,
            trajectory.forks);
}

TEST_F(HistoryTest, WhatLeavesNoRoomEndsTheEpisode) {
  const Tokens history = encode(std::string(kPrompt) + "shorter<|im_end|>" + kReply);
  const auto goes_on = [&](const Limits& limits) {
    Trajectory trajectory = answered("because");
    const bool goes_on = add_history(trajectory, prompt_, history, "and?", *tokenizer_, limits);
    EXPECT_NE(trajectory.is_truncated, goes_on);
    EXPECT_EQ(trajectory.forks.size(), goes_on ? 1U : 0U);
    return goes_on;
  };
  const std::int64_t drawn = std::ssize(answered("because").tokens);
  EXPECT_TRUE(goes_on({drawn + 1, std::ssize(history) + 1}));
  EXPECT_FALSE(goes_on({drawn, std::ssize(history) + 1}));
  EXPECT_FALSE(goes_on({drawn + 1, std::ssize(history)}));
}

TEST_F(HistoryTest, RowsOfAForkShareTheirAdvantage) {
  const config::RunConfig config = run("rows", {"data.shuffle=false"});
  const Prompts prompts(config, train::DataPart::kTrain, *tokenizer_);
  std::vector<Group> groups(1);
  for (const double reward : {1.0, 0.0, 0.0}) {
    Trajectory trajectory = answered("because");
    trajectory.reward = reward;
    groups[0].trajectories.push_back(trajectory);
  }
  Trajectory& forked = groups[0].trajectories[0];
  const Tokens history = encode("Once more: ");
  forked.forks.push_back({history, 3});
  const std::int64_t all = std::ssize(forked.tokens);
  for (std::int64_t t = 0; t < all; ++t)
    forked.logprobs[static_cast<std::size_t>(t)] = -0.1 * static_cast<double>(t);
  const Experience experience(config, prompts, groups);
  const Tokens& prompt = prompts.row(0).tokens;
  ASSERT_EQ(experience.tokens().size(), 4U);
  EXPECT_EQ(std::ssize(experience.tokens()[0]), std::ssize(prompt) + 3);
  EXPECT_EQ(std::ssize(experience.tokens()[1]), std::ssize(history) + all - 3);
  EXPECT_TRUE(std::equal(history.begin(), history.end(), experience.tokens()[1].begin()));
  EXPECT_THAT(experience.rewards(), ElementsAre(1, 1, 0, 0));
  const std::vector<objective::PolicyRow> rows = experience.policy_rows(3);
  // Three completions are a group, not four.
  std::vector<Group> whole = groups;
  whole[0].trajectories[0].forks.clear();
  const double expected =
      Experience(config, prompts, whole).policy_rows(3)[0].advantages.at(prompt.size());
  EXPECT_EQ(rows[0].advantages.at(prompt.size()), expected);
  EXPECT_EQ(rows[1].advantages.at(history.size()), expected);
  // Labels stand one place before their tokens.
  EXPECT_NEAR(rows[0].old.at(prompt.size() + 1), -0.2, 1e-12);
  EXPECT_NEAR(rows[1].old.at(history.size() - 1), -0.3, 1e-12);
  EXPECT_EQ(experience.step(0, 0, 1).loss_rows, 3 * all);
}

class RenderedHistoryTest : public RlTest {
 protected:
  config::RunConfig rendered(const std::string& name, const nlohmann::json& meta,
                             const Words& more = {}) const {
    Words all = {"rl.history=render", "data.max_length=192", "rollout.max_new_tokens=48"};
    all.insert(all.end(), more.begin(), more.end());
    return played(name, meta, all);
  }
  /// A tool answers the first of two turns.
  const nlohmann::json meta_ = {{"turns", 2}, {"replies", "it rains"}};
};

TEST_F(RenderedHistoryTest, WhatWasDrawnIsTrainedAfterWhatItFollowed) {
  for (const Words& more : {Words{}, Words{"rollout.top_k=20"},
                            Words{"rl.mode=async", "rl.max_staleness=1", "optim.lr=0"}}) {
    const std::string name = more.empty() ? "plain" : more[0];
    const Reports reports = train(rendered(name, meta_, more));
    double forks = 0;
    for (const train::StepInfo& step : reports.steps) {
      // Log-probabilities of generation are those of the rows that training makes.
      EXPECT_NEAR(step.metrics.at("mismatch_abs_max"), 0, 1e-5) << name;
      forks += step.metrics.at("forks");
    }
    // A turn that ends by a stop text is rendered without it.
    EXPECT_GT(forks, 8) << name;
  }
}

TEST_F(RenderedHistoryTest, RowsOfForksHaveTheirExperts) {
  const Reports reports = train(rendered("experts", meta_, with_experts({"rl.router_replay=r3"})));
  for (const train::StepInfo& step : reports.steps) {
    EXPECT_EQ(step.metrics.at("router_agreement"), 1);
    EXPECT_NEAR(step.metrics.at("mismatch_abs_max"), 0, 1e-6);
    EXPECT_GT(step.metrics.at("forks"), 0);
  }
}

TEST_F(RenderedHistoryTest, EvaluationsRenderToo) {
  const Reports reports =
      train(rendered("held-out", meta_,
                     {"data.eval=" + (dir_ / "held-out.jsonl").string(), "train.eval_every=2",
                      "optim.lr=0", "rollout.temperature=1e-6"}));
  EXPECT_DOUBLE_EQ(reports.evaluations.back().metrics.at("reward"),
                   reports.mean("reward_mean", 0, 2));
}

TEST_F(RenderedHistoryTest, ATextCannotBeRendered) {
  const std::string message = testing::message_of([&] {
    train(rendered("text", nlohmann::json::object({{"turns", 3}})));
  });
  EXPECT_THAT(message, ::testing::HasSubstr("rl.history render renders messages"));
}

}  // namespace
}  // namespace heddle::rl
