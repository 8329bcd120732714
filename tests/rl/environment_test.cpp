// Episodes of a program that keeps their state, calls of tools that are parsed, and replies that
// the chat template renders.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <numeric>

#include "base/errors.h"
#include "rl/dialogue.h"
#include "rl/rl_fixture.h"
#include "train/vocabulary.h"

namespace heddle {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class EnvironmentTest : public RlTest {
 protected:
  std::vector<json> groups(const std::string& name) const {
    std::vector<json> rows;
    std::ifstream log(dir_ / name / "groups.jsonl");
    for (std::string line; std::getline(log, line);) rows.push_back(json::parse(line));
    return rows;
  }
  /// Each token ends a turn.
  void end_turns_at_once() const {
    std::vector<std::int32_t> ends(4096);
    std::iota(ends.begin(), ends.end(), 0);
    files::write_atomically(dir_ / "model" / "generation_config.json",
                            json{{"eos_token_id", ends}}.dump());
  }
};

TEST_F(EnvironmentTest, TrainsAsAProgramWithoutMemoryDoes) {
  const Words more = {"rollout.stop=[e, a]", "rl.deterministic=true", "train.max_steps=3"};
  const Reports program = train(episodes("program", more));
  const Reports environment = train(played("environment", {{"turns", 3}}, more));
  ASSERT_EQ(program.steps.size(), 3U);
  ASSERT_EQ(environment.steps.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(program.steps[i].loss, environment.steps[i].loss);
    EXPECT_EQ(program.steps[i].metrics.at("reward_mean"),
              environment.steps[i].metrics.at("reward_mean"));
  }
  EXPECT_GT(environment.mean("reward_mean", 0, 3), 0.2);
}

TEST_F(EnvironmentTest, BeginsAnEpisodeWithItsOwnPrompt) {
  for (const json& opens : {json("find 7"), json{{{"role", "system"}, {"content", "A game."}},
                                                 {{"role", "user"}, {"content", "find 7"}}}}) {
    const std::string name = opens.is_string() ? "text" : "messages";
    const auto config = played(name, {{"turns", 2}, {"opens", opens}});
    const Reports reports = train(config);
    EXPECT_NEAR(reports.steps.front().metrics.at("ratio_mean"), 1, 1e-7);
    const std::vector<json> rows = groups(name);
    ASSERT_FALSE(rows.empty());
    for (const json& row : rows) {
      EXPECT_THAT(row.at("prompt").get<std::string>(), HasSubstr("find 7"));
      EXPECT_THAT(row.at("prompt").get<std::string>(), ::testing::Not(HasSubstr("say")));
      if (opens.is_array()) {
        EXPECT_THAT(row.at("prompt").get<std::string>(), HasSubstr("A game."));
      }
    }
  }
}

TEST_F(EnvironmentTest, LeavesOutAPromptWhoseEpisodesBeginApart) {
  const json meta = {{"opens_apart", true}};
  EXPECT_THAT(testing::message_of([&] { train(played("apart", meta)); }),
              HasSubstr("begin with different prompts"));
}

TEST_F(EnvironmentTest, GoesOnAfterAWorkerThatEnds) {
  // All episodes of the worker are lost, and with them their prompts, until the run gives up.
  end_turns_at_once();
  const json meta = {{"turns", 3}, {"dies_at", 2}};
  EXPECT_THAT(testing::message_of([&] { train(played("dies", meta)); }),
              HasSubstr("could be judged; the last one: "));
  EXPECT_EQ(train(played("failed", meta, {"rl.reward.failed=-1"})).steps.size(), 2U);
  for (const json& row : groups("failed")) {
    // An episode is lost in its second turn, by its own fault, or before, with its worker.
    for (const json& sample : row.at("samples"))
      EXPECT_THAT(sample.at("reward").get<double>(), ::testing::AnyOf(0.25 - 1, -1));
  }
}

TEST_F(EnvironmentTest, PromptsWhoseEpisodesWereLostWithAWorkerArePlayedAnew) {
  end_turns_at_once();
  const json meta = {{"turns", 3}, {"dies_once", (dir_ / "mark").string()}};
  // Twelve groups are under way, more than may fail in a row, and both workers have episodes of
  // each.
  const Reports reports = train(
      played("once", meta,
             {"rl.mode=async", "rl.max_staleness=2", "rl.update_mode=wait", "train.max_steps=3"}));
  ASSERT_EQ(reports.steps.size(), 3U);
  double failed = 0;
  for (const train::StepInfo& step : reports.steps) {
    failed += step.metrics.at("rejected_failed");
    EXPECT_DOUBLE_EQ(step.metrics.at("reward_mean"), 0.25 + 0.25 + 1);
  }
  EXPECT_EQ(failed, 1) << "the prompt whose episode ended the worker";
  std::ifstream ledger(dir_ / "once" / "ledger.log");
  std::int64_t again = 0;
  for (std::string line; std::getline(ledger, line);) {
    const json entry = json::parse(line.substr(line.find(' ') + 1));
    if (entry.contains("dispatched")) again += entry.at("dispatched").at("attempt") == 1;
  }
  EXPECT_GT(again, 0);
}

TEST_F(EnvironmentTest, EvaluatesByEpisodes) {
  end_turns_at_once();
  const json meta = {{"turns", 3}, {"opens", "find 7"}};
  const Reports reports =
      train(played("held-out", meta,
                   {"data.eval=" + (dir_ / "held-out.jsonl").string(), "train.max_steps=3",
                    "train.eval_every=3", "optim.lr=0", "rollout.temperature=1e-6"}));
  const auto& evaluation = reports.evaluations.back();
  EXPECT_DOUBLE_EQ(evaluation.metrics.at("reward"), 0.25 + 0.25 + 1);
  EXPECT_DOUBLE_EQ(evaluation.metrics.at("reward"), reports.mean("reward_mean", 0, 3));
}

TEST_F(EnvironmentTest, RendersMessagesOfToolsAfterATurn) {
  end_turns_at_once();
  const json meta = {{"turns", 2}, {"replies", "it <rains>"}};
  const Reports reports =
      train(played("replies", meta, {"data.max_length=128", "rollout.max_new_tokens=96"}));
  EXPECT_NEAR(reports.steps.front().metrics.at("ratio_mean"), 1, 1e-7);
  EXPECT_DOUBLE_EQ(reports.mean("reward_mean", 0, 2), 1.5);
  for (const json& row : groups("replies")) {
    for (const json& sample : row.at("samples")) {
      ASSERT_EQ(sample.at("turns").size(), 1U);
      const auto observation = sample.at("turns")[0].at("observation").get<std::string>();
      EXPECT_THAT(observation,
                  HasSubstr("<|im_end|>\n<|im_start|>user\n<tool_response>\nit <rains>\n"));
      EXPECT_THAT(observation, HasSubstr("<|im_start|>assistant\n"));
    }
  }
}

class DialogueTest : public EnvironmentTest {
 protected:
  void SetUp() override {
    EnvironmentTest::SetUp();
    config_ = played("dialogue", {});
    tokenizer_ = train::load_tokenizer(config_).tokenizer;
    dialogue_.emplace(config_, *tokenizer_);
  }
  config::RunConfig config_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  std::optional<rl::Dialogue> dialogue_;
};

TEST_F(DialogueTest, TellsReasoningContentAndCallsApart) {
  const json tools = {
      {{"type", "function"},
       {"function",
        {{"name", "add"},
         {"parameters",
          {{"type", "object"},
           {"properties", {{"a", {{"type", "integer"}}}, {"b", {{"type", "string"}}}}}}}}}}};
  const std::string call =
      "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</"
      "parameter>\n"
      "</function>\n</tool_call>";
  const json message = dialogue_->message("I add.\n</think>\n\nSo:\n\n" + call, "<think>\n", tools);
  EXPECT_EQ(message.at("role"), "assistant");
  EXPECT_EQ(message.at("reasoning_content"), "I add.");
  EXPECT_EQ(message.at("content"), "So:");
  EXPECT_EQ(message.at("tool_calls"),
            (json{{{"type", "function"},
                   {"function", {{"name", "add"}, {"arguments", {{"a", 2}, {"b", "3"}}}}}}}));
  // A call that never ends is content.
  const json open = dialogue_->message("<tool_call>\n<function=add>", "", nullptr);
  EXPECT_EQ(open.at("content"), "<tool_call>\n<function=add>");
  EXPECT_FALSE(open.contains("tool_calls"));
  EXPECT_FALSE(open.contains("reasoning_content"));
}

TEST_F(DialogueTest, TakesWhateverCallAPolicyWrites) {
  const auto call = [](const std::string& value) {
    return "<tool_call>\n<function=f>\n<parameter=a>\n" + value +
           "\n</parameter>\n</function>\n</tool_call>";
  };
  const auto argument_of = [&](const std::string& value) {
    const rl::Json message = dialogue_->message(call(value), "", nullptr);
    return message.contains("tool_calls") ? message["tool_calls"][0]["function"]["arguments"]["a"]
                                          : rl::Json("content");
  };
  EXPECT_EQ(argument_of("18446744073709551616"), "18446744073709551616");
  const std::string digits(1000, '7');
  EXPECT_EQ(argument_of(digits), digits);
  for (const int depth : {1, 63, 64, 99, 100, 101, 1000}) {
    const std::string nested = std::string(static_cast<std::size_t>(depth), '[') +
                               std::string(static_cast<std::size_t>(depth), ']');
    const rl::Json value = argument_of(nested);
    // Deeper than is read it is a text.
    EXPECT_TRUE(value == nested || value.dump() == nested) << depth;
  }
  for (const char* odd : {"{\"a\": 1, \"a\": 2}", "NaN", "1e999", "\xff", "\"\\ud800\"", ""})
    EXPECT_NO_THROW(argument_of(odd)) << odd;
}

TEST_F(DialogueTest, RepliesAsTheTemplateGoesOn) {
  const std::int32_t end = tokenizer_->encode("<|im_end|>").at(0);
  const std::int32_t other = tokenizer_->encode("a").at(0);
  const rl::Json reply = {{{"role", "tool"}, {"content", "5"}},
                          {{"role", "user"}, {"content", "Thanks. And 6?"}}};
  const std::string whole = dialogue_->reply(reply, other), rest = dialogue_->reply(reply, end);
  EXPECT_EQ(whole, "<|im_end|>" + rest);
  EXPECT_TRUE(rest.starts_with("\n<|im_start|>user\n<tool_response>\n5\n</tool_response>")) << rest;
  EXPECT_THAT(rest, HasSubstr("Thanks. And 6?<|im_end|>\n<|im_start|>assistant\n"));
  // The tokens are those of a conversation in which the assistant said anything at all.
  const auto refused = [&](const rl::Json& messages) {
    return testing::message_of([&] { dialogue_->reply(messages, end); });
  };
  EXPECT_THAT(refused({{{"role", "assistant"}, {"content", "x"}}}), HasSubstr("policy's"));
  EXPECT_THAT(refused({{{"content", "x"}}}), HasSubstr("role"));
  EXPECT_THAT(refused(rl::Json::array({"text"})), HasSubstr("messages[0]"));
}

}  // namespace
}  // namespace heddle
