// Requests that go on from the state at the end of their conversation's last one.
#include <gtest/gtest.h>

#include <map>

#include "assembly/tiny_model_on_ranks.h"
#include "rollout/engine.h"

namespace heddle::rollout {
namespace {

class ConversationsTest : public ::testing::TestWithParam<bool> {
 protected:
  ConversationsTest()
      : loaded_(
            testing::tiny_model_on_ranks(at::kDouble, GetParam(), assembly::Purpose::kGenerate)) {}

  struct Run {
    std::map<RequestId, Completion> completions;
    std::int64_t read = 0;  ///< Prompt tokens in passes.
  };
  static Run finish(Engine& engine) {
    Run run;
    while (!engine.is_idle()) {
      for (Progress& progress : engine.step()) {
        if (progress.completion) run.completions[progress.id] = std::move(*progress.completion);
      }
      if (!engine.last_pass().draws) run.read += engine.last_pass().tokens;
    }
    return run;
  }
  static EngineOptions options() {
    EngineOptions options{.max_sequences = 4, .capacity = 160};
    options.caches.kv_page = 8;
    return options;
  }
  static Request request_of(std::int64_t length, std::int64_t new_tokens, std::uint64_t seed) {
    Request request;
    for (std::int64_t t = 0; t < length; ++t)
      request.prompt.push_back(static_cast<std::int32_t>((11 * length + t * t) % 97));
    request.max_new_tokens = new_tokens;
    request.sampling.seed = seed;
    return request;
  }
  /// Tokens after a turn: its answer, and an observation.
  static std::vector<std::int32_t> after(const std::vector<std::int32_t>& prompt,
                                         const Completion& turn) {
    std::vector<std::int32_t> tokens = prompt;
    tokens.insert(tokens.end(), turn.output_ids.begin(), turn.output_ids.end());
    tokens.insert(tokens.end(), {3, 4, 5});
    return tokens;
  }
  Completion alone(Request request) {
    request.conversation = -1;
    Engine engine(loaded_, nullptr, options());
    engine.submit(request);
    return finish(engine).completions[0];
  }
  static void expect_equal(const Completion& found, const Completion& expected) {
    EXPECT_EQ(found.output_ids, expected.output_ids);
    ASSERT_EQ(found.logprobs.size(), expected.logprobs.size());
    for (std::size_t t = 0; t < found.logprobs.size(); ++t)
      EXPECT_NEAR(found.logprobs[t], expected.logprobs[t], 1e-9) << t;
  }
  void change_weights() {
    loaded_.model->visit_parameters([](nn::Parameter& parameter) {
      if (parameter.name().find("layers.0.") != std::string::npos) parameter.data().mul_(1.5);
    });
  }
  static std::pair<std::int64_t, std::int64_t> all_free() { return {4 + 4, 4 * 20}; }

  assembly::ModelOnRanks loaded_;
};

TEST_P(ConversationsTest, ATurnReadsWhatIsNewAlone) {
  Engine engine(loaded_, nullptr, options());
  Request group = request_of(30, 6, 1);
  group.samples = 3;
  group.conversation = 40;
  engine.submit(group);
  Run first = finish(engine);
  EXPECT_EQ(first.read, 30 - 1);
  std::map<std::int64_t, std::vector<std::int32_t>> prompts;
  for (const auto& [id, turn] : first.completions)
    prompts[40 + turn.sample] = after(group.prompt, turn);
  for (int turns = 0; turns < 3; ++turns) {
    std::map<RequestId, Request> turn;
    for (const auto& [conversation, prompt] : prompts) {
      Request request = request_of(1, 6, static_cast<std::uint64_t>(conversation + 100 * turns));
      request.prompt = prompt;
      request.conversation = conversation;
      turn[engine.submit(request)] = request;
    }
    Run run = finish(engine);
    // The last token of a turn, which was drawn and not read, and the observation.
    EXPECT_EQ(run.read, 3 * (1 + 3));
    for (const auto& [id, request] : turn) {
      const Completion& completion = run.completions.at(id);
      EXPECT_EQ(completion.cached_tokens, std::ssize(request.prompt) - 4);
      expect_equal(completion, alone(request));
      prompts[request.conversation] = after(request.prompt, completion);
    }
  }
  EXPECT_NE(engine.free_memory(), all_free());
  for (const std::int64_t conversation : {40, 41, 42}) engine.end_conversation(conversation);
  EXPECT_EQ(engine.free_memory(), all_free());
  engine.end_conversation(43);
}

TEST_P(ConversationsTest, AStateIsItsConversationsAlone) {
  Engine engine(loaded_, nullptr, options());
  Request request = request_of(30, 6, 1);
  request.conversation = 1;
  engine.submit(request);
  request.prompt = after(request.prompt, finish(engine).completions[0]);
  for (const std::int64_t other : {-1, 2}) {
    request.conversation = other;
    const RequestId id = engine.submit(request);
    EXPECT_EQ(finish(engine).completions[id].cached_tokens, 0);
  }
  // One that does not go on from it drops it.
  request.conversation = 1;
  request.prompt[4] += 1;
  const RequestId id = engine.submit(request);
  const Completion changed = finish(engine).completions[id];
  EXPECT_EQ(changed.cached_tokens, 0);
  expect_equal(changed, alone(request));
  engine.end_conversation(1);
  engine.end_conversation(2);
  EXPECT_EQ(engine.free_memory(), all_free());
}

TEST_P(ConversationsTest, ChangedWeightsDropAStateUnlessTheContextMayBeMixed) {
  for (const LiveSequences live : {LiveSequences::kRecompute, LiveSequences::kKeep}) {
    Engine engine(loaded_, nullptr, options());
    Request request = request_of(30, 6, 1);
    request.conversation = 1;
    engine.submit(request);
    request.prompt = after(request.prompt, finish(engine).completions[0]);
    change_weights();
    engine.weights_changed(1, live);
    engine.submit(request);
    const Completion turn = finish(engine).completions[1];
    if (live == LiveSequences::kRecompute) {
      EXPECT_EQ(turn.cached_tokens, 0);
      expect_equal(turn, alone(request));
    } else {
      EXPECT_EQ(turn.cached_tokens, 30 + 6 - 1);
      EXPECT_GT(std::abs(turn.logprobs[0] - alone(request).logprobs[0]), 1e-9) << "a mixed context";
    }
  }
}

TEST_P(ConversationsTest, AStateGivesWayToSequencesAndThePromptIsReadAgain) {
  // Pages of two sequences at full length, which three have in turn.
  EngineOptions small{.max_sequences = 2, .capacity = 160};
  small.caches.kv_page = 8;
  small.pages = 24;
  Engine engine(loaded_, nullptr, small);
  Request request = request_of(60, 6, 1);
  request.conversation = 1;
  engine.submit(request);
  request.prompt = after(request.prompt, finish(engine).completions[0]);
  engine.submit(request_of(100, 20, 2));
  engine.submit(request_of(40, 20, 3));
  finish(engine);
  const RequestId id = engine.submit(request);
  const Completion turn = finish(engine).completions[id];
  EXPECT_EQ(turn.cached_tokens, 0);
  expect_equal(turn, alone(request));
}

TEST_P(ConversationsTest, ATurnStartsBeforeRequestsThatWait) {
  EngineOptions one = options();
  one.max_sequences = 1;
  one.kept_states = 1;
  Engine engine(loaded_, nullptr, one);
  Request request = request_of(30, 4, 1);
  request.conversation = 1;
  const RequestId first = engine.submit(request);
  // They wait; each would take the memory of the state.
  for (const std::uint64_t seed : {2, 3, 4}) engine.submit(request_of(40, 4, seed));
  Completion turn;
  RequestId second = -1;
  while (second < 0) {
    for (const Progress& progress : engine.step()) {
      if (progress.id != first || !progress.completion) continue;
      request.prompt = after(request.prompt, *progress.completion);
      second = engine.submit(request);
    }
  }
  std::vector<RequestId> order;
  while (!engine.is_idle()) {
    for (const Progress& progress : engine.step()) {
      if (!progress.completion) continue;
      order.push_back(progress.id);
      if (progress.id == second) turn = *progress.completion;
    }
  }
  EXPECT_EQ(order, (std::vector<RequestId>{second, 1, 2, 3}));
  EXPECT_EQ(turn.cached_tokens, 30 + 4 - 1);
}

TEST_P(ConversationsTest, ACancelledTurnLeavesNothing) {
  Engine engine(loaded_, nullptr, options());
  Request request = request_of(30, 6, 1);
  request.conversation = 1;
  engine.submit(request);
  request.prompt = after(request.prompt, finish(engine).completions[0]);
  // It waits, and its state is still there; then it has taken it.
  for (const int steps : {0, 2}) {
    const RequestId id = engine.submit(request);
    for (int i = 0; i < steps; ++i) engine.step();
    engine.abort(id);
    if (steps > 0) {
      EXPECT_EQ(engine.free_memory(), all_free());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ConversationsTest, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Experts" : "Dense");
});

}  // namespace
}  // namespace heddle::rollout
