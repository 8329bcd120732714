// CacheOptions of an engine on a GPU: states of bf16, and batches that are recorded.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <optional>

#include "models/answers.h"
#include "rollout/engine.h"
#include "testing/model_on_gpu.h"

namespace heddle::rollout {
namespace {

class GpuCacheOptions : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or libtorch_cuda is not linked";
    placed_.emplace(testing::model_on_gpu(assembly::Purpose::kGenerate));
  }

  static Request request_of(std::int64_t i) {
    Request request;
    for (std::int64_t t = 0; t < 20 + i % 3; ++t)
      request.prompt.push_back(
          static_cast<std::int32_t>((31 * i + 7 * t) % testing::kVocabularyOnGpu));
    request.max_new_tokens = 12;
    request.sampling.seed = static_cast<std::uint64_t>(i);
    return request;
  }
  testing::Answers generate(std::int64_t count, const CacheOptions& caches, bool records) {
    EngineOptions options{.max_sequences = count, .capacity = 64, .record_steps = records};
    options.caches = caches;
    Engine engine(*placed_, nullptr, options);
    for (std::int64_t i = 0; i < count; ++i) engine.submit(request_of(i));
    return testing::answers_of(engine);
  }

  std::optional<assembly::ModelOnRanks> placed_;
};

TEST_F(GpuCacheOptions, RecordedStepsRoundStatesAsLaunchedOnesDo) {
  const CacheOptions rounded{.state_dtype = StateDtype::kBFloat16};
  for (const std::int64_t count : {1, 5, 8}) {
    const testing::Answers found = generate(count, rounded, true),
                           launched = generate(count, rounded, false),
                           wide = generate(count, {}, true);
    // The last token of each prompt is read by a step.
    EXPECT_EQ(found.recorded, 12);
    EXPECT_EQ(launched.recorded, 0);
    double drift = 0, compared = 0;
    for (const auto& [id, completion] : found.completions) {
      const Completion& other = launched.completions.at(id);
      EXPECT_EQ(completion.output_ids, other.output_ids) << id;
      for (std::size_t t = 0; t < other.logprobs.size(); ++t)
        EXPECT_NEAR(completion.logprobs[t], other.logprobs[t], 0.05) << id << " " << t;
      // A seed may draw another token from another distribution.
      const Completion& exact = wide.completions.at(id);
      if (completion.output_ids[0] != exact.output_ids[0]) continue;
      drift += std::abs(completion.logprobs[0] - exact.logprobs[0]);
      ++compared;
    }
    EXPECT_GT(drift, 0) << "states that are not rounded";
    EXPECT_LT(drift, 0.1 * compared);
  }
}

TEST_F(GpuCacheOptions, ForksHaveTheStatesOfSeparatePrompts) {
  EngineOptions options{.max_sequences = 4, .capacity = 64};
  options.caches.state_dtype = StateDtype::kBFloat16;
  Engine together(*placed_, nullptr, options), apart(*placed_, nullptr, options);
  Request group = request_of(0);
  group.samples = 4;
  together.submit(group);
  for (std::uint64_t i = 0; i < 4; ++i) {
    Request sample = request_of(0);
    sample.sampling.seed = seed_of_sample(group.sampling.seed, i);
    apart.submit(sample);
  }
  const testing::Answers forks = testing::answers_of(together),
                         separate = testing::answers_of(apart);
  std::size_t compared = 0;
  for (const auto& [id, completion] : forks.completions) {
    // One prompt's pass and that of four have other products in bf16, with which a seed may draw
    // the next id: after that they are other texts.
    const Completion& other = separate.completions.at(id);
    std::size_t t = 0;
    for (; t < completion.logprobs.size() && completion.output_ids[t] == other.output_ids[t]; ++t)
      EXPECT_NEAR(completion.logprobs[t], other.logprobs[t], 0.05) << id << " " << t;
    compared += t;
  }
  EXPECT_GE(compared, 8U);
}

TEST_F(GpuCacheOptions, BatchesThatAreNamedAreRecorded) {
  CacheOptions some;
  some.graph_batches = {2, 4};
  const testing::Answers filled_up = generate(3, some, true), larger = generate(5, some, true),
                         usual = generate(5, {}, true);
  EXPECT_EQ(filled_up.recorded, 11);
  EXPECT_EQ(larger.recorded, 0);
  EXPECT_EQ(larger.launched, 11);
  EXPECT_EQ(usual.recorded, 11);
  for (const auto& [id, completion] : larger.completions)
    EXPECT_EQ(completion.output_ids, usual.completions.at(id).output_ids) << id;
}

}  // namespace
}  // namespace heddle::rollout
