#include "rollout/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "assembly/tiny_model_on_ranks.h"
#include "base/errors.h"
#include "testing/message_of.h"
#include "testing/paths.h"
#include "train/scorer.h"

namespace heddle::rollout {
namespace {

using ::testing::HasSubstr;

/// Random weights in double, so that sums in another order choose the same tokens.
class EngineTest : public ::testing::TestWithParam<bool> {
 protected:
  std::vector<Request> requests(double temperature) const {
    std::vector<Request> all;
    for (int i = 0; i < 7; ++i) {
      Request request;
      for (int t = 0; t < 1 + 5 * i; ++t) request.prompt.push_back((13 * i + t * t) % 97);
      request.max_new_tokens = 3 + 4 * (i % 4);
      request.sampling = {.temperature = temperature, .seed = static_cast<std::uint64_t>(5 + i)};
      all.push_back(std::move(request));
    }
    return all;
  }
  std::vector<Completion> run(const std::vector<Request>& requests,
                              const EngineOptions& options = {}) {
    return generate(loaded_, tokenizer_, requests, options);
  }
  static std::vector<std::vector<std::int32_t>> ids(const std::vector<Completion>& completions) {
    std::vector<std::vector<std::int32_t>> all;
    for (const Completion& completion : completions) all.push_back(completion.output_ids);
    return all;
  }

  void SetUp() override {
    loaded_ = testing::tiny_model_on_ranks(at::kDouble, GetParam(), assembly::Purpose::kGenerate);
  }

  std::shared_ptr<const data::Tokenizer> tokenizer_ =
      data::Tokenizer::load(testing::source_path("examples/tokenizer-4k"));
  assembly::ModelOnRanks loaded_;
};

TEST_P(EngineTest, DependsOnNeitherBatchNorCutsOfPrompts) {
  const auto whole = ids(run(requests(1)));
  for (const EngineOptions& options :
       {EngineOptions{.max_sequences = 1}, EngineOptions{.max_sequences = 3},
        EngineOptions{.prefill_tokens = 4}, EngineOptions{.max_sequences = 2, .prefill_tokens = 1}})
    EXPECT_EQ(ids(run(requests(1), options)), whole);
}

TEST_P(EngineTest, DependsNotOnTheOrderOfRequests) {
  std::vector<Request> turned = requests(1);
  std::reverse(turned.begin(), turned.end());
  auto answers = ids(run(turned, {.max_sequences = 3}));
  std::reverse(answers.begin(), answers.end());
  EXPECT_EQ(answers, ids(run(requests(1))));
}

/// Runs what was submitted to its end, calling `between` after each step.
std::vector<Completion> finish(Engine& engine, std::size_t requests,
                               const std::function<void(std::int64_t step)>& between = {}) {
  std::vector<Completion> completions(requests);
  for (std::int64_t step = 0; !engine.is_idle(); ++step) {
    for (Progress& progress : engine.step()) {
      if (progress.completion)
        completions[static_cast<std::size_t>(progress.id)] = std::move(*progress.completion);
    }
    if (between) between(step);
  }
  return completions;
}

TEST_P(EngineTest, DependsNotOnPreemption) {
  const std::vector<Request> all = requests(1);
  Engine engine(loaded_, tokenizer_, {.max_sequences = 4, .capacity = 64});
  for (const Request& request : all) engine.submit(request);
  const auto interrupted = finish(engine, all.size(), [&](std::int64_t step) {
    engine.preempt(step % static_cast<std::int64_t>(all.size()));
  });
  const std::vector<Completion> whole = run(all);
  EXPECT_EQ(ids(interrupted), ids(whole));
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(interrupted[i].text, whole[i].text);
}

TEST_P(EngineTest, CountsItsPassesAndWhatLosesItsState) {
  const std::vector<Request> all = requests(1);
  Engine engine(loaded_, tokenizer_, {.max_sequences = 3, .capacity = 64});
  for (const Request& request : all) engine.submit(request);
  EngineCounts expected;
  finish(engine, all.size(), [&](std::int64_t step) {
    if (engine.last_pass().draws) {
      ++expected.draws;
      expected.drawn_sequences += engine.last_pass().sequences;
    }
    if (step == 5) {
      expected.preempted += engine.queued().second;
      engine.weights_changed(1);
    } else if (step == 9) {
      // Its id waits: nothing is taken from it.
      engine.preempt(static_cast<RequestId>(all.size()) - 1);
    }
  });
  EXPECT_GT(expected.draws, 5);
  EXPECT_GT(expected.drawn_sequences, expected.draws);
  EXPECT_GT(expected.preempted, 0);
  EXPECT_EQ(engine.take_counts(), expected);
  EXPECT_EQ(engine.take_counts(), EngineCounts{});
  // A request that is taken out is not read again.
  const RequestId id = engine.submit(all[1]);
  engine.step();
  engine.abort(id);
  EXPECT_EQ(engine.take_counts().preempted, 0);
}

TEST_P(EngineTest, TakesRequestsWhileItRuns) {
  const std::vector<Request> all = requests(1);
  Engine engine(loaded_, tokenizer_, {.max_sequences = 2, .capacity = 64});
  std::size_t submitted = 0;
  engine.submit(all[submitted++]);
  const auto completions = finish(engine, all.size(), [&](std::int64_t) {
    if (submitted < all.size()) engine.submit(all[submitted++]);
  });
  EXPECT_EQ(ids(completions), ids(run(all)));
}

TEST_P(EngineTest, AnAbortedRequestGivesWhatItHasAndItsSlot) {
  const std::vector<Request> all = requests(1);
  const std::vector<Completion> whole = run(all);
  Engine engine(loaded_, tokenizer_, {.max_sequences = 1, .capacity = 64});
  for (const std::size_t i : {3, 2}) engine.submit(all[i]);
  for (int step = 0; step < 4; ++step) engine.step();
  const Completion aborted = engine.abort(0);
  EXPECT_EQ(aborted.finish_reason, FinishReason::kAborted);
  const auto& expected = whole[3].output_ids;
  EXPECT_EQ(aborted.output_ids, std::vector<std::int32_t>(expected.begin(), expected.begin() + 4));
  EXPECT_THROW(engine.abort(0), InternalError);
  EXPECT_EQ(finish(engine, 2)[1].output_ids, whole[2].output_ids);
}

TEST_P(EngineTest, LowerPriorityNumbersStartFirstAndDrawTheSame) {
  std::vector<Request> all = requests(1);
  const auto whole = ids(run(all));
  Engine engine(loaded_, tokenizer_, {.max_sequences = 1, .capacity = 64});
  const std::vector<std::int64_t> priorities = {9, 0, 4, 0, -2, 4, 1};
  engine.submit(all[0]);
  engine.step();  // the first has begun before the others come
  for (std::size_t i = 1; i < all.size(); ++i) {
    all[i].priority = priorities[i];
    engine.submit(all[i]);
  }
  std::vector<RequestId> ended;
  while (!engine.is_idle()) {
    for (const Progress& progress : engine.step()) {
      if (!progress.completion) continue;
      ended.push_back(progress.id);
      EXPECT_EQ(progress.completion->output_ids, whole[static_cast<std::size_t>(progress.id)]);
    }
  }
  EXPECT_THAT(ended, ::testing::ElementsAre(0, 4, 1, 3, 6, 2, 5));
}

TEST_P(EngineTest, DrawsInPlacesOfThePromptFollowTheModel) {
  Request request = requests(1)[2];
  request.max_new_tokens = 2;
  request.prompt_logprobs = 1;
  request.prompt_draws = 3;
  request.sampling.temperature = 0;
  const std::size_t places = request.prompt.size() - 1;
  const Completion greedy = run({request})[0];
  ASSERT_EQ(greedy.prompt_draws.size(), places);
  for (std::size_t t = 0; t < places; ++t) {
    ASSERT_EQ(greedy.prompt_draws[t].size(), 3U);
    for (const TokenLogprob& draw : greedy.prompt_draws[t])
      EXPECT_EQ(draw.id, greedy.prompt_top_logprobs[t + 1][0].id);
  }
  request.sampling.temperature = 1;
  request.prompt_draws = 400;
  const Completion drawn = run({request})[0];
  EXPECT_EQ(drawn.output_ids, run({[&] {
                                Request plain = request;
                                plain.prompt_draws = 0;
                                return plain;
                              }()})[0]
                                  .output_ids)
      << "draws take nothing from the answer's stream";
  // In pieces of the prompt too, each draw is the same one.
  const Completion pieces = run({request}, {.prefill_tokens = 4})[0];
  for (std::size_t t = 0; t < places; ++t) {
    const TokenLogprob& likely = drawn.prompt_top_logprobs[t + 1][0];
    double count = 0;
    for (std::size_t n = 0; n < 400; ++n) {
      const TokenLogprob& draw = drawn.prompt_draws[t][n];
      EXPECT_EQ(draw.id, pieces.prompt_draws[t][n].id);
      if (draw.id != likely.id) continue;
      ++count;
      EXPECT_NEAR(draw.logprob, likely.logprob, 1e-6);  // draws are told in fp32
    }
    const double p = std::exp(likely.logprob);
    EXPECT_NEAR(count, 400 * p, 5 * std::sqrt(400 * p * (1 - p)) + 1) << "place " << t;
  }
  // Draws have the log-probabilities that targets of the same ids have.
  request.prompt_draws = 0;
  for (std::size_t t = 0; t < places; ++t)
    request.prompt_targets.push_back({drawn.prompt_draws[t][0].id, drawn.prompt_draws[t][1].id});
  const Completion told = run({request})[0];
  for (std::size_t t = 0; t < places; ++t) {
    for (std::size_t n = 0; n < 2; ++n)
      EXPECT_NEAR(told.prompt_target_logprobs[t][n], drawn.prompt_draws[t][n].logprob, 1e-6);
  }
}

TEST_P(EngineTest, ShownSpecialTokensLeaveOutTheStopId) {
  std::vector<Request> all = requests(1);
  const std::vector<std::int32_t> longest = run(all)[3].output_ids;
  all[3].skip_special_tokens = false;
  all[3].stop_ids = {longest[4]};
  const Completion stopped = run(all)[3];
  std::vector<std::int32_t> shown = stopped.output_ids;
  shown.pop_back();
  EXPECT_EQ(stopped.text, tokenizer_->decode(shown, /*skip_special_tokens=*/false));
}

TEST_P(EngineTest, ChangedWeightsDrawFromTheTokensSoFar) {
  const Request request = requests(1)[3];
  Engine engine(loaded_, tokenizer_, {.max_sequences = 1, .capacity = 64});
  engine.submit(request);
  for (int step = 0; step < 5; ++step) engine.step();
  nn::Parameter& head = loaded_.model->head_weight();
  head.data().mul_(0.5);
  engine.weights_changed(7);
  const Completion completion = finish(engine, 1)[0];
  for (std::size_t t = 0; t < completion.output_ids.size(); ++t)
    EXPECT_EQ(completion.weights_versions[t], t < 5 ? 0 : 7);
  // The rest is what the new weights say after the tokens of the old ones.
  std::vector<std::int32_t> row = request.prompt;
  row.insert(row.end(), completion.output_ids.begin(), completion.output_ids.end());
  const auto scores = train::Scorer(loaded_).score(std::vector<std::vector<std::int32_t>>{row}, {});
  for (std::size_t t = 0; t < completion.output_ids.size(); ++t) {
    const double scored = scores[0].logprobs[request.prompt.size() + t];
    if (t < 5) {
      EXPECT_GT(std::abs(completion.logprobs[t] - scored), 1e-5);
    } else {
      EXPECT_NEAR(completion.logprobs[t], scored, 1e-5);
    }
  }
}

TEST_P(EngineTest, EndsAtAStopTokenWhichIsPartOfTheOutput) {
  std::vector<Request> all = requests(1);
  const std::vector<Completion> whole = run(all);
  const std::vector<std::int32_t>& longest = whole[3].output_ids;
  all[3].stop_ids = {longest[4]};
  const Completion stopped = run(all)[3];
  const auto end = std::find(longest.begin(), longest.end(), longest[4]) + 1;
  EXPECT_EQ(stopped.output_ids, std::vector<std::int32_t>(longest.begin(), end));
  EXPECT_EQ(stopped.finish_reason, FinishReason::kStop);
}

TEST_P(EngineTest, StreamsTheTextOfEachRequest) {
  std::vector<std::string> texts(7);
  const std::vector<Completion> completions =
      generate(loaded_, tokenizer_, requests(1), {.max_sequences = 3},
               [&](std::size_t index, const std::string& piece) { texts[index] += piece; });
  for (std::size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(texts[i], completions[i].text);
    EXPECT_EQ(texts[i], tokenizer_->decode(completions[i].output_ids, true));
  }
}

TEST_P(EngineTest, RefusesWhatTheModelCannotRead) {
  std::vector<Request> all = requests(0);
  all[2].prompt = {};
  EXPECT_THAT(testing::message_of([&] { run(all); }), HasSubstr("request 3: the prompt has no"));
  all[2].prompt = {97};
  EXPECT_THAT(testing::message_of([&] { run(all); }),
              HasSubstr("request 3: token id 97 is outside the model's vocabulary of 97"));
  Engine engine(loaded_, tokenizer_, {.capacity = 8});
  EXPECT_THAT(
      testing::message_of([&] { engine.submit(requests(0)[1]); }),
      HasSubstr("a prompt of 6 tokens and max_new_tokens 7 exceed the engine's capacity of 8"));
}

INSTANTIATE_TEST_SUITE_P(Models, EngineTest, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Experts" : "Dense");
});

}  // namespace
}  // namespace heddle::rollout
