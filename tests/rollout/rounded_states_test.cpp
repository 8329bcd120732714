// Recurrent states of bf16 (CacheOptions::state_dtype) through the engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "assembly/tiny_model_on_ranks.h"
#include "base/errors.h"
#include "rollout/engine.h"
#include "rollout/pool_size.h"
#include "testing/message_of.h"

namespace heddle::rollout {
namespace {

using ::testing::HasSubstr;

/// Half the distance between two numbers of bf16, relative to them, at most.
constexpr double kRoundoff = 1.0 / 256;

/// A prompt is computed in double, so that other batches round the same states.
class RoundedStatesTest : public ::testing::TestWithParam<bool> {
 protected:
  RoundedStatesTest()
      : loaded_(
            testing::tiny_model_on_ranks(at::kDouble, GetParam(), assembly::Purpose::kGenerate)) {}

  static EngineOptions options(StateDtype dtype = StateDtype::kBFloat16) {
    EngineOptions options{.max_sequences = 4, .capacity = 400};
    options.caches.state_dtype = dtype;
    options.caches.kv_page = 8;
    return options;
  }
  static Request request_of(std::int64_t length, std::int64_t new_tokens) {
    Request request;
    for (std::int64_t t = 0; t < length; ++t)
      request.prompt.push_back(static_cast<std::int32_t>((5 * length + t * t) % 97));
    request.max_new_tokens = new_tokens;
    request.sampling.seed = 3;
    return request;
  }
  static std::map<RequestId, Completion> finish(Engine& engine) {
    std::map<RequestId, Completion> completions;
    while (!engine.is_idle()) {
      for (Progress& progress : engine.step()) {
        if (progress.completion) completions[progress.id] = std::move(*progress.completion);
      }
    }
    return completions;
  }
  Completion alone(const Request& request, const EngineOptions& options) {
    Engine engine(loaded_, nullptr, options);
    engine.submit(request);
    return finish(engine)[0];
  }
  static void expect_equal(const Completion& found, const Completion& expected,
                           std::size_t skipped = 0) {
    ASSERT_EQ(found.output_ids.size() + skipped, expected.output_ids.size());
    for (std::size_t t = 0; t < found.output_ids.size(); ++t) {
      EXPECT_EQ(found.output_ids[t], expected.output_ids[t + skipped]) << t;
      EXPECT_NEAR(found.logprobs[t], expected.logprobs[t + skipped], 1e-9) << t;
    }
  }

  assembly::ModelOnRanks loaded_;
};

TEST_P(RoundedStatesTest, TakeHalfTheMemory) {
  const CachePool::Size size = pool_size(loaded_, options());
  CachePool half(*loaded_.model, size),
      wide(*loaded_.model, pool_size(loaded_, options(StateDtype::kFloat32)));
  for (std::size_t layer = 0; layer < half.cache().size(); ++layer) {
    const at::Tensor state = half.cache()[layer].state;
    if (!state.defined()) continue;
    EXPECT_EQ(state.scalar_type(), at::kBFloat16);
    // float64 of a float64 model
    EXPECT_EQ(4 * state.nbytes(), wide.cache()[layer].state.nbytes());
    EXPECT_EQ(half.cache()[layer].conv.scalar_type(), at::kDouble);
  }
}

TEST_P(RoundedStatesTest, ForksOfAPromptAreSeparatePrompts) {
  for (const std::int64_t length : {1, 8, 65, 70}) {
    Engine engine(loaded_, nullptr, options());
    Request group = request_of(length, 12);
    group.samples = 6;  // more than have room at once
    engine.submit(group);
    const auto completions = finish(engine);
    for (const auto& [id, completion] : completions) {
      Request sample = request_of(length, 12);
      sample.sampling.seed =
          seed_of_sample(group.sampling.seed, static_cast<std::uint64_t>(completion.sample));
      expect_equal(completion, alone(sample, options()));
    }
  }
}

TEST_P(RoundedStatesTest, AnInterruptedSequenceGoesOnAsAPromptOfItsTokensWould) {
  constexpr std::int64_t kDrawn = 10;
  Request request = request_of(20, 30);
  // Random numbers go by the place of a token in its answer, which another prompt would move.
  request.sampling.temperature = 0;
  Engine engine(loaded_, nullptr, options());
  engine.submit(request);
  engine.submit(request_of(33, 40));
  std::int64_t drawn = 0;
  while (drawn < kDrawn) {
    for (const Progress& progress : engine.step()) drawn += progress.id == 0;
  }
  engine.preempt(0);
  const Completion interrupted = finish(engine)[0];
  request.prompt.insert(request.prompt.end(), interrupted.output_ids.begin(),
                        interrupted.output_ids.begin() + kDrawn);
  request.max_new_tokens -= kDrawn;
  expect_equal(alone(request, options()), interrupted, kDrawn);
}

TEST_P(RoundedStatesTest, ATurnGoesOnFromTheStateAsItWasStored) {
  Engine engine(loaded_, nullptr, options());
  Request turn = request_of(20, 12);
  turn.sampling.temperature = 0;
  turn.conversation = 7;
  engine.submit(turn);
  const Completion first = finish(engine)[0];
  turn.prompt.insert(turn.prompt.end(), first.output_ids.begin(), first.output_ids.end());
  turn.max_new_tokens = 5;
  engine.submit(turn);
  const Completion second = finish(engine)[1];
  EXPECT_EQ(second.cached_tokens, 20 + 12 - 1);
  // A turn without anything between is the same answer going on.
  Request whole = request_of(20, 17);
  whole.sampling.temperature = 0;
  expect_equal(second, alone(whole, options()), 12);
}

TEST(RoundedStates, NeedRecurrentStates) {
  runtime::Context context;
  context.dtype = at::kFloat;
  assembly::ModelRecipe recipe;
  recipe.config = testing::tiny_config(false, "qwen3");
  recipe.purpose = assembly::Purpose::kGenerate;
  recipe.weights = assembly::Weights::kRandom;
  recipe.generates = true;
  assembly::ModelOnRanks loaded = assembly::place(recipe, context);
  EngineOptions options;
  options.caches.state_dtype = StateDtype::kBFloat16;
  EXPECT_THAT(testing::message_of([&] { Engine engine(loaded, nullptr, options); }),
              HasSubstr("rollout.state_dtype: bfloat16 is for recurrent states, and the model has "
                        "no Gated DeltaNet layer: expected float32"));
}

TEST_P(RoundedStatesTest, DriftOfLogProbabilitiesStaysAtTheirRounding) {
  // 300 drawn tokens, and what the same model says of each with wide states.
  const Request request = request_of(12, 300);
  const Completion rounded = alone(request, options());
  Request whole = request;
  whole.prompt.insert(whole.prompt.end(), rounded.output_ids.begin(), rounded.output_ids.end());
  whole.max_new_tokens = 0;
  whole.prompt_logprobs = 0;
  const Completion exact = alone(whole, options(StateDtype::kFloat32));
  double sum[3] = {}, largest = 0;
  for (std::size_t t = 0; t < 300; ++t) {
    const double drift =
        std::abs(rounded.logprobs[t] - exact.prompt_logprobs[request.prompt.size() + t]);
    sum[t / 100] += drift / 100;
    largest = std::max(largest, drift);
  }
  // Errors of a state decay with e^g, where a step adds one rounding: together they are below
  // kRoundoff / (1 - e^g) of it. g is that of make_lively() where the layer's input says nothing.
  const double g = -std::exp(-1.5) * std::log1p(std::exp(-0.5)),
               bound = kRoundoff / (1 - std::exp(g));
  // In every hundred, so that it does not grow.
  for (const double mean : sum) EXPECT_LE(mean, bound);
  // Three layers have states. A token that other experts take moves further.
  if (!GetParam()) {
    EXPECT_LE(largest, 3 * bound);
  }
  EXPECT_GT(largest, 1e-6) << "states that are not rounded";
}

INSTANTIATE_TEST_SUITE_P(Models, RoundedStatesTest, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Experts" : "Dense");
});

}  // namespace
}  // namespace heddle::rollout
