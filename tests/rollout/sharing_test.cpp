// Memory that sequences share: forks of one prompt, kept states, pages that are short.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "assembly/tiny_model_on_ranks.h"
#include "base/errors.h"
#include "base/rng.h"
#include "rollout/adapter_slots.h"
#include "rollout/engine.h"

namespace heddle::rollout {
namespace {

/// Runs what was submitted to its end, calling `between` after each step.
std::map<RequestId, Completion> finish(Engine& engine,
                                       const std::function<void(std::int64_t step)>& between = {}) {
  std::map<RequestId, Completion> completions;
  for (std::int64_t step = 0; !engine.is_idle(); ++step) {
    for (Progress& progress : engine.step()) {
      if (progress.completion) completions[progress.id] = std::move(*progress.completion);
    }
    if (between) between(step);
  }
  return completions;
}

Request request_of(std::int64_t length, std::int64_t new_tokens, std::uint64_t seed = 1) {
  Request request;
  for (std::int64_t t = 0; t < length; ++t)
    request.prompt.push_back(static_cast<std::int32_t>((7 * length + t * t) % 97));
  request.max_new_tokens = new_tokens;
  request.sampling.seed = seed;
  return request;
}

void expect_equal(const Completion& found, const Completion& expected, const std::string& name) {
  EXPECT_EQ(found.output_ids, expected.output_ids) << name;
  ASSERT_EQ(found.logprobs.size(), expected.logprobs.size()) << name;
  for (std::size_t t = 0; t < found.logprobs.size(); ++t) {
    EXPECT_NEAR(found.logprobs[t], expected.logprobs[t], 1e-5) << name << " token " << t;
    EXPECT_NEAR(found.sampled_logprobs[t], expected.sampled_logprobs[t], 1e-5) << name;
  }
}

class SharingTest : public ::testing::TestWithParam<bool> {
 protected:
  SharingTest()
      : loaded_(
            testing::tiny_model_on_ranks(at::kDouble, GetParam(), assembly::Purpose::kGenerate)) {}

  Completion alone(const Request& request, const EngineOptions& options = {}) {
    Engine engine(loaded_, nullptr, options);
    engine.submit(request);
    return finish(engine)[0];
  }
  /// A sample as it is without the others.
  Completion alone(Request request, std::int64_t sample) {
    request.samples = 1;
    request.sampling.seed =
        seed_of_sample(request.sampling.seed, static_cast<std::uint64_t>(sample));
    return alone(request);
  }

  assembly::ModelOnRanks loaded_;
};

TEST_P(SharingTest, ForksOfAPromptAreSeparatePrompts) {
  // Around the borders of pages (8), chunks of the rule (64) and of passes (50).
  const std::vector<std::int64_t> lengths = GetParam()
                                                ? std::vector<std::int64_t>{1, 9, 51, 65}
                                                : std::vector<std::int64_t>{1, 2, 8, 9, 49, 51, 65};
  for (const std::int64_t length : lengths) {
    for (const std::int64_t room : {2, 8}) {
      Engine engine(
          loaded_, nullptr,
          {.max_sequences = room, .prefill_tokens = 50, .capacity = 80, .caches = {.kv_page = 8}});
      Request group = request_of(length, 6);
      group.samples = 5;
      Request other = request_of(length + 1, 4, 9);
      other.samples = 2;
      engine.submit(group);
      engine.submit(other);
      const auto completions = finish(engine);
      ASSERT_EQ(completions.size(), 7u);
      for (const auto& [id, completion] : completions) {
        const bool of_group = id < 5;
        EXPECT_EQ(completion.sample, of_group ? id : id - 5);
        expect_equal(completion, alone(of_group ? group : other, completion.sample),
                     std::to_string(length) + "/" + std::to_string(id));
      }
    }
  }
}

TEST_P(SharingTest, AGroupReadsItsPromptOnce) {
  Engine engine(loaded_, nullptr, {.max_sequences = 4, .prefill_tokens = 16, .capacity = 80});
  Request group = request_of(40, 3);
  group.samples = 8;
  engine.submit(group);
  std::int64_t passes = 0;
  const auto completions = finish(engine, [&](std::int64_t) { ++passes; });
  // 39 tokens in three passes, then two waves of three steps.
  EXPECT_EQ(passes, 3 + 2 * 3);
  for (const auto& [id, completion] : completions)
    EXPECT_EQ(completion.cached_tokens, id == 0 ? 0 : 39) << id;
}

TEST_P(SharingTest, ShortPagesAndInterruptionsChangeNothing) {
  const CounterRng rng(3, "interruptions");
  Request group = request_of(30, 12);
  group.samples = 4;
  const Request single = request_of(45, 10, 5);
  // 12 pages of 8 tokens: two sequences at their end, and no more.
  Engine engine(loaded_, nullptr,
                {.max_sequences = 6,
                 .prefill_tokens = 20,
                 .capacity = 60,
                 .caches = {.kv_page = 8},
                 .pages = 12,
                 .kept_states = 2});
  engine.submit(group);
  engine.submit(single);
  const auto completions = finish(engine, [&](std::int64_t step) {
    const auto place = static_cast<std::uint64_t>(step);
    if (step < 40) engine.preempt(static_cast<RequestId>(rng.below(place, 5)));
  });
  ASSERT_EQ(completions.size(), 5u);
  for (const auto& [id, completion] : completions)
    expect_equal(completion, id < 4 ? alone(group, id) : alone(single), std::to_string(id));
}

TEST_P(SharingTest, AnAbortedLeaderLeavesTheOthers) {
  Engine engine(loaded_, nullptr, {.max_sequences = 4, .prefill_tokens = 8, .capacity = 80});
  Request group = request_of(40, 3);
  group.samples = 3;
  engine.submit(group);
  engine.step();
  EXPECT_EQ(engine.abort(0).finish_reason, FinishReason::kAborted);
  const auto completions = finish(engine);
  ASSERT_EQ(completions.size(), 2u);
  for (const auto& [id, completion] : completions)
    expect_equal(completion, alone(group, id), std::to_string(id));
}

TEST_P(SharingTest, TheNextTurnGoesOnFromTheKeptState) {
  Engine engine(loaded_, nullptr, {.max_sequences = 2, .capacity = 120, .caches = {.kv_page = 8}});
  Request turn = request_of(20, 5);
  turn.keep_state = true;
  std::vector<std::int32_t> conversation = turn.prompt;
  for (int i = 0; i < 4; ++i) {
    engine.submit(turn);
    const auto completions = finish(engine);
    const Completion& completion = completions.begin()->second;
    Request cold = turn;
    cold.keep_state = false;
    expect_equal(completion, alone(cold), "turn " + std::to_string(i));
    // All but the last token, which was drawn and not read.
    EXPECT_EQ(completion.cached_tokens,
              i == 0 ? 0 : static_cast<std::int64_t>(conversation.size()) - 1 - 2);
    conversation.insert(conversation.end(), completion.output_ids.begin(),
                        completion.output_ids.end());
    conversation.insert(conversation.end(), {3, 4});
    turn.prompt = conversation;
  }
}

TEST_P(SharingTest, ChangedWeightsDropKeptStates) {
  Engine engine(loaded_, nullptr, {.max_sequences = 2, .capacity = 120});
  Request request = request_of(20, 5);
  request.keep_state = true;
  engine.submit(request);
  const auto before = finish(engine);
  loaded_.model->visit_parameters([](nn::Parameter& parameter) {
    if (parameter.name().find("layers.0.") != std::string::npos) parameter.data().mul_(1.5);
  });
  engine.weights_changed(1);
  engine.submit(request);
  const auto after = finish(engine);
  Request cold = request;
  cold.keep_state = false;
  expect_equal(after.at(1), alone(cold), "as a cold engine");
  EXPECT_EQ(after.at(1).cached_tokens, 0);
  EXPECT_GT(std::abs(after.at(1).logprobs[0] - before.at(0).logprobs[0]), 1e-6);
}

TEST_P(SharingTest, KeptCachesOfOldWeightsAreGoneOnFrom) {
  Request request = request_of(20, 6);
  Engine engine(loaded_, nullptr, {.max_sequences = 2, .capacity = 120});
  engine.submit(request);
  for (int i = 0; i < 3; ++i) engine.step();
  loaded_.model->visit_parameters([](nn::Parameter& parameter) {
    if (parameter.name().find("layers.0.") != std::string::npos) parameter.data().mul_(1.5);
  });
  engine.weights_changed(4, LiveSequences::kKeep);
  const Completion kept = finish(engine)[0];
  EXPECT_EQ(kept.weights_versions, (std::vector<std::int64_t>{0, 0, 0, 4, 4, 4}));
  request.prompt.insert(request.prompt.end(), kept.output_ids.begin(), kept.output_ids.begin() + 3);
  request.max_new_tokens = 1;
  EXPECT_GT(std::abs(kept.logprobs[3] - alone(request).logprobs[0]), 1e-9) << "a mixed context";
}

TEST_P(SharingTest, MemoryIsGivenBackAndMadeAgain) {
  const Request request = request_of(20, 6);
  Engine engine(loaded_, nullptr, {.max_sequences = 2, .capacity = 120});
  engine.submit(request);
  for (int i = 0; i < 3; ++i) engine.step();
  engine.release_memory();
  expect_equal(finish(engine)[0], alone(request), "after the release");
}

TEST_P(SharingTest, ManyRequestsLeaveNoMemoryTaken) {
  // With cancelling and interruptions; what they took must come back.
  const CounterRng rng(7, "many");
  Engine engine(loaded_, nullptr,
                {.max_sequences = 16,
                 .capacity = 24,
                 .caches = {.kv_page = 4},
                 .pages = 40,
                 .kept_states = 3});
  std::uint64_t draws = 0;
  const auto below = [&](std::uint64_t n) { return rng.below(draws++, n); };
  std::vector<RequestId> live;
  const std::int64_t all = GetParam() ? 150 : 600;
  std::int64_t submitted = 0, ended = 0, aborted = 0;
  while (submitted < all || !engine.is_idle()) {
    while (submitted < all && live.size() < 24) {
      Request request = request_of(1 + static_cast<std::int64_t>(below(18)),
                                   1 + static_cast<std::int64_t>(below(5)), below(100));
      request.samples = 1 + static_cast<std::int64_t>(below(3));
      request.keep_state = below(3) == 0;
      const RequestId first = engine.submit(request);
      for (std::int64_t i = 0; i < request.samples; ++i) live.push_back(first + i);
      submitted += request.samples;
    }
    if (below(4) == 0 && !live.empty()) {
      const std::size_t place = below(live.size());
      engine.abort(live[place]);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(place));
      ++aborted;
    }
    if (below(3) == 0 && !live.empty()) engine.preempt(live[below(live.size())]);
    for (const Progress& progress : engine.step()) {
      if (!progress.completion) continue;
      std::erase(live, progress.id);
      ++ended;
    }
  }
  EXPECT_EQ(ended + aborted, submitted);
  engine.weights_changed(1);  // drops kept states
  EXPECT_EQ(engine.free_memory(), (std::pair<std::int64_t, std::int64_t>{16 + 3, 40}));
}

INSTANTIATE_TEST_SUITE_P(Models, SharingTest, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Experts" : "Dense");
});

}  // namespace
}  // namespace heddle::rollout
