#include "rollout/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
      request.sampling = {.temperature = temperature, .seed = 5};
      all.push_back(std::move(request));
    }
    return all;
  }
  std::vector<Completion> run(const std::vector<Request>& requests,
                              const EngineOptions& options = {}) {
    return generate(*loaded_.model, tokenizer_, requests, options);
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
  std::vector<Request> turned = requests(0);
  std::reverse(turned.begin(), turned.end());
  auto answers = ids(run(turned, {.max_sequences = 3}));
  std::reverse(answers.begin(), answers.end());
  EXPECT_EQ(answers, ids(run(requests(0))));
}

TEST_P(EngineTest, LogProbabilitiesAreThoseOfScoring) {
  const std::vector<Request> all = requests(1);
  const std::vector<Completion> completions = run(all);
  std::vector<std::vector<std::int32_t>> rows;
  for (std::size_t i = 0; i < all.size(); ++i) {
    rows.push_back(all[i].prompt);
    rows[i].insert(rows[i].end(), completions[i].output_ids.begin(),
                   completions[i].output_ids.end());
  }
  const std::vector<train::RowScore> scores = train::Scorer(loaded_).score(rows, {});
  for (std::size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(completions[i].output_ids.size(), static_cast<std::size_t>(all[i].max_new_tokens));
    EXPECT_EQ(completions[i].finish_reason, FinishReason::kLength);
    for (std::size_t t = 0; t < completions[i].logprobs.size(); ++t) {
      // The sampler reads logits in fp32.
      EXPECT_NEAR(completions[i].logprobs[t], scores[i].logprobs[all[i].prompt.size() + t], 1e-5)
          << "request " << i << ", token " << t;
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
      generate(*loaded_.model, tokenizer_, requests(1), {.max_sequences = 3},
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
}

INSTANTIATE_TEST_SUITE_P(Models, EngineTest, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Experts" : "Dense");
});

}  // namespace
}  // namespace heddle::rollout
