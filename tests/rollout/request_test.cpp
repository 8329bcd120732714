// Results that requests can ask for besides tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "assembly/tiny_model_on_ranks.h"
#include "base/errors.h"
#include "rollout/engine.h"
#include "testing/message_of.h"
#include "train/scorer.h"

namespace heddle::rollout {
namespace {

using ::testing::HasSubstr;

class RequestTest : public ::testing::Test {
 protected:
  Request request(std::int64_t length = 70, std::int64_t new_tokens = 12) const {
    Request made;
    for (std::int64_t t = 0; t < length; ++t)
      made.prompt.push_back(static_cast<std::int32_t>((3 * length + t * t) % 97));
    made.max_new_tokens = new_tokens;
    made.sampling.seed = 11;
    return made;
  }
  Completion run(const Request& request, const EngineOptions& options = {}) {
    return generate(loaded_, nullptr, {request}, options)[0];
  }
  std::vector<double> scored(std::vector<std::int32_t> row) {
    return train::Scorer(loaded_)
        .score(std::vector<std::vector<std::int32_t>>{row}, {})[0]
        .logprobs;
  }
  /// The whole distribution after `tokens`.
  std::vector<double> distribution(std::vector<std::int32_t> tokens) {
    Request all;
    all.prompt = std::move(tokens);
    all.max_new_tokens = 1;
    all.top_logprobs = 97;
    std::vector<double> logprobs(97);
    const Completion completion = run(all);
    for (const TokenLogprob& token : completion.top_logprobs[0])
      logprobs[static_cast<std::size_t>(token.id)] = token.logprob;
    return logprobs;
  }

  assembly::ModelOnRanks loaded_ =
      testing::tiny_model_on_ranks(at::kDouble, false, assembly::Purpose::kGenerate);
};

TEST_F(RequestTest, TellsTheMostLikelyTokens) {
  Request asked = request();
  asked.top_logprobs = 3;
  const Completion completion = run(asked), plain = run(request());
  EXPECT_EQ(completion.output_ids, plain.output_ids);
  EXPECT_TRUE(plain.top_logprobs.empty());
  ASSERT_EQ(completion.top_logprobs.size(), completion.output_ids.size());
  std::vector<std::int32_t> tokens = asked.prompt;
  for (std::size_t t = 0; t < completion.output_ids.size(); ++t) {
    const std::vector<TokenLogprob>& top = completion.top_logprobs[t];
    ASSERT_EQ(top.size(), 3u);
    std::vector<double> all = distribution(tokens);
    for (const TokenLogprob& token : top)
      EXPECT_NEAR(token.logprob, all[static_cast<std::size_t>(token.id)], 1e-5);
    std::sort(all.rbegin(), all.rend());
    for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(top[i].logprob, all[i], 1e-5);
    tokens.push_back(completion.output_ids[t]);
  }
}

TEST_F(RequestTest, ThePromptsLogprobsAreThoseOfScoring) {
  Request asked = request();
  asked.prompt_logprobs = 2;
  asked.samples = 2;
  const std::vector<double> expected = scored(asked.prompt);
  for (const std::int64_t prefill_tokens : {4096, 16}) {
    const std::vector<Completion> both =
        generate(loaded_, nullptr, {asked}, {.prefill_tokens = prefill_tokens});
    ASSERT_EQ(both.size(), 2u);
    const Completion& first = both[0];
    EXPECT_TRUE(both[1].prompt_logprobs.empty()) << "told once";
    ASSERT_EQ(first.prompt_logprobs.size(), asked.prompt.size());
    ASSERT_EQ(first.prompt_top_logprobs.size(), asked.prompt.size());
    EXPECT_TRUE(std::isnan(first.prompt_logprobs[0]));
    for (std::size_t t = 1; t < asked.prompt.size(); ++t) {
      EXPECT_NEAR(first.prompt_logprobs[t], expected[t], 1e-5) << t;
      ASSERT_EQ(first.prompt_top_logprobs[t].size(), 2u);
      EXPECT_GE(first.prompt_top_logprobs[t][0].logprob, first.prompt_logprobs[t] - 1e-6);
    }
  }
  // Nothing is drawn: only the prompt is read.
  asked.samples = 1;
  asked.max_new_tokens = 0;
  const Completion read = run(asked);
  EXPECT_TRUE(read.output_ids.empty());
  EXPECT_NEAR(read.prompt_logprobs.back(), expected.back(), 1e-5);
}

TEST_F(RequestTest, TellsTheLogprobsOfChosenTokensInThePrompt) {
  Request asked = request();
  asked.prompt_logprobs = 1;
  asked.prompt_targets.resize(asked.prompt.size() - 1);
  asked.prompt_targets[0] = {5};
  asked.prompt_targets[2] = {7, asked.prompt[3], 7};
  asked.prompt_targets.back() = {9};
  for (const std::int64_t prefill_tokens : {4096, 16}) {
    const Completion told =
        generate(loaded_, nullptr, {asked}, {.prefill_tokens = prefill_tokens})[0];
    ASSERT_EQ(told.prompt_target_logprobs.size(), asked.prompt_targets.size());
    for (std::size_t t = 0; t < asked.prompt_targets.size(); ++t) {
      const std::vector<double> all = distribution(
          {asked.prompt.begin(), asked.prompt.begin() + static_cast<std::ptrdiff_t>(t) + 1});
      ASSERT_EQ(told.prompt_target_logprobs[t].size(), asked.prompt_targets[t].size()) << t;
      for (std::size_t i = 0; i < asked.prompt_targets[t].size(); ++i)
        EXPECT_NEAR(told.prompt_target_logprobs[t][i],
                    all[static_cast<std::size_t>(asked.prompt_targets[t][i])], 1e-5);
    }
    ASSERT_EQ(told.prompt_logprobs.size(), asked.prompt.size());
    EXPECT_NEAR(told.prompt_logprobs[3], told.prompt_target_logprobs[2][1], 1e-9);
  }
  asked.prompt_targets.pop_back();
  EXPECT_THROW(run(asked), DataError);
}

TEST_F(RequestTest, PenaltiesAndBiasChangeTheDistributionThatIsDrawnFrom) {
  Request asked = request(20, 8);
  asked.sampling.repetition_penalty = 1.7;
  asked.sampling.presence_penalty = 0.4;
  asked.sampling.frequency_penalty = 0.3;
  asked.sampling.logit_bias = {{5, 2.0}, {6, -100.0}};
  asked.sampling.temperature = 0.8;
  const Completion completion = run(asked);
  std::vector<std::int32_t> tokens = asked.prompt;
  for (std::size_t t = 0; t < completion.output_ids.size(); ++t) {
    const std::int32_t id = completion.output_ids[t];
    EXPECT_NEAR(completion.logprobs[t], distribution(tokens)[static_cast<std::size_t>(id)], 1e-5);
    EXPECT_NE(id, 6);
    tokens.push_back(id);
  }
  EXPECT_NE(completion.output_ids, run(request(20, 8)).output_ids);
}

TEST_F(RequestTest, ALargeBiasDecidesAndItsShareIsTold) {
  Request asked = request(20, 4);
  asked.sampling.logit_bias = {{42, 100.0}};
  const Completion completion = run(asked);
  EXPECT_EQ(completion.output_ids, (std::vector<std::int32_t>{42, 42, 42, 42}));
  for (std::size_t t = 0; t < 4; ++t) {
    EXPECT_NEAR(completion.sampled_logprobs[t], 0, 1e-5);
    EXPECT_LT(completion.logprobs[t], -0.1);
  }
  // Taken for each time that it was there: 100, 60, 20, -20.
  asked.sampling.frequency_penalty = 40;
  const std::vector<std::int32_t> ids = run(asked).output_ids;
  EXPECT_EQ(std::vector<std::int32_t>(ids.begin(), ids.begin() + 3),
            (std::vector<std::int32_t>{42, 42, 42}));
  EXPECT_NE(ids[3], 42);
}

TEST_F(RequestTest, StopIdsWaitForTheLeastNumberOfTokensOrEndNothing) {
  Request asked = request(20, 12);
  const std::vector<std::int32_t> free = run(asked).output_ids;
  asked.stop_ids = {free[2]};
  EXPECT_EQ(run(asked).output_ids.size(), 3u);
  asked.min_tokens = 6;
  const std::vector<std::int32_t> later = run(asked).output_ids;
  EXPECT_GE(later.size(), 6u);
  EXPECT_EQ(std::count(later.begin(), later.begin() + 6, free[2]), 0);
  asked.min_tokens = 0;
  asked.ignore_eos = true;
  EXPECT_EQ(run(asked).output_ids, free);
}

TEST_F(RequestTest, TellsTheSupportThatCutsLeft) {
  Request asked = request(20, 6);
  asked.sampling.top_k = 5;
  asked.sampling.top_p = 0.6;
  asked.return_support = true;
  const Completion completion = run(asked);
  std::vector<std::int32_t> tokens = asked.prompt;
  for (std::size_t t = 0; t < completion.output_ids.size(); ++t) {
    const std::vector<std::int32_t>& support = completion.supports[t];
    const std::vector<double> all = distribution(tokens);
    const auto logprob = [&](std::int32_t id) { return all[static_cast<std::size_t>(id)]; };
    EXPECT_LE(support.size(), 5u);
    EXPECT_TRUE(std::is_sorted(support.begin(), support.end()));
    double sum = 0;
    for (const std::int32_t id : support) sum += std::exp(logprob(id));
    const std::int32_t id = completion.output_ids[t];
    EXPECT_TRUE(std::find(support.begin(), support.end(), id) != support.end());
    EXPECT_NEAR(completion.sampled_logprobs[t], logprob(id) - std::log(sum), 1e-5);
    tokens.push_back(id);
  }
}

TEST_F(RequestTest, SamplesHaveStreamsOfTheirOwnAndTheFirstIsTheRequests) {
  Request asked = request(20, 12);
  const std::vector<std::int32_t> one = run(asked).output_ids;
  asked.samples = 3;
  const std::vector<Completion> all = generate(loaded_, nullptr, {asked, request(9, 3)}, {});
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0].output_ids, one);
  EXPECT_NE(all[1].output_ids, one);
  EXPECT_NE(all[1].output_ids, all[2].output_ids);
  EXPECT_EQ(all[3].output_ids, run(request(9, 3)).output_ids);
}

TEST_F(RequestTest, RefusesOptionsOutOfRange) {
  const auto message = [&](const std::function<void(Request&)>& change) {
    Request asked = request(4, 2);
    change(asked);
    return testing::message_of([&] { run(asked); });
  };
  EXPECT_THAT(message([](Request& r) { r.sampling.top_p = 0; }),
              HasSubstr("top_p is 0: expected a probability in (0, 1]"));
  EXPECT_THAT(message([](Request& r) {
                r.sampling.logit_bias = {{97, 1.0}};
              }),
              HasSubstr("token id 97 is outside the model's vocabulary of 97"));
  EXPECT_THAT(message([](Request& r) { r.return_support = true; }),
              HasSubstr("return_support without top_k"));
  EXPECT_THAT(message([](Request& r) { r.samples = 0; }), HasSubstr("samples is 0: expected 1"));
  EXPECT_THAT(message([](Request& r) { r.sampling.repetition_penalty = 0; }),
              HasSubstr("repetition_penalty is 0: expected a number above 0"));
}

}  // namespace
}  // namespace heddle::rollout
