// Recorded steps of a model with routed experts, on a GPU.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ckpt/hf_adapter.h"
#include "models/answers.h"
#include "rollout/engine.h"
#include "testing/model_on_gpu.h"

namespace heddle::rollout {
namespace {

class GpuExpertsDecoding : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or libtorch_cuda is not linked";
    assembly::NewAdapters adapters;
    adapters.targets = {"all-linear"};
    placed_.emplace(testing::model_on_gpu(assembly::Purpose::kGenerate, adapters,
                                          /*has_experts=*/true));
  }

  /// `parameters`: stacked matrices of the experts that it changes, too.
  std::shared_ptr<const Adapter> set(const std::string& name,
                                     const std::vector<std::string>& parameters) {
    adapters::LoraOptions options;
    options.rank = 8;
    options.alpha = 16;
    auto own = std::make_shared<adapters::LoraSet>(ckpt::adaptable(*placed_->model),
                                                   std::vector<std::string>{"q_proj", "out_proj"},
                                                   parameters, options, placed_->context);
    own->initialize();
    own->visit_parameters([&](nn::Parameter& factor) {
      if (factor.name().find("lora_B") != std::string::npos) factor.data().normal_(0, 0.1);
    });
    return std::make_shared<const Adapter>(Adapter{name, 0, own});
  }

  using Found = testing::Answers;
  /// Answers to `count` requests, request i with adapters[i % size].
  Found generate(std::int64_t count, const std::vector<std::shared_ptr<const Adapter>>& adapters,
                 bool records) {
    Engine engine(*placed_, nullptr,
                  {.max_sequences = count, .capacity = 64, .record_steps = records});
    for (std::int64_t i = 0; i < count; ++i) {
      Request request;
      for (std::int64_t t = 0; t < 4 + i % 3; ++t)
        request.prompt.push_back(
            static_cast<std::int32_t>((31 * i + 7 * t) % testing::kVocabularyOnGpu));
      request.max_new_tokens = 12;
      request.sampling.seed = static_cast<std::uint64_t>(i);
      request.adapter = adapters[static_cast<std::size_t>(i) % adapters.size()];
      engine.submit(std::move(request));
    }
    return testing::answers_of(engine);
  }

  std::optional<assembly::ModelOnRanks> placed_;
};

TEST_F(GpuExpertsDecoding, RecordedStepsDrawWhatLaunchedOnesDo) {
  const std::shared_ptr<const Adapter> base =
                                           std::make_shared<const Adapter>(Adapter{"base", 0, {}}),
                                       dense = set("dense", {}),
                                       experts = set("experts", {"mlp.experts.gate_up_proj",
                                                                 "mlp.experts.down_proj"});
  // A bucket that is full, and one with rows that fill it up.
  for (const std::int64_t count : {8, 5}) {
    std::vector<std::vector<std::int32_t>> ids;
    for (const auto& adapter : {base, experts}) {
      SCOPED_TRACE(adapter->name + " " + std::to_string(count));
      const Found found = generate(count, {adapter}, true),
                  launched = generate(count, {adapter}, false);
      EXPECT_EQ(found.recorded, 11);
      EXPECT_EQ(launched.recorded, 0);
      for (const auto& [id, completion] : found.completions) {
        const Completion& other = launched.completions.at(id);
        EXPECT_EQ(completion.output_ids, other.output_ids) << id;
        ASSERT_EQ(completion.logprobs.size(), other.logprobs.size());
        for (std::size_t t = 0; t < other.logprobs.size(); ++t)
          EXPECT_NEAR(completion.logprobs[t], other.logprobs[t], 0.05) << id << " " << t;
      }
      ids.push_back(found.completions.at(0).output_ids);
    }
    EXPECT_NE(ids[0], ids[1]);
  }
  // Tables mix sets, with roundings of their own (GpuAdaptersOfRequests), but have no factors of
  // experts.
  EXPECT_EQ(generate(6, {base, experts}, true).recorded, 0);
  EXPECT_EQ(generate(6, {base, dense}, true).recorded, 11);
}

TEST_F(GpuExpertsDecoding, RecordedStepsTellTheExpertsOfLaunchedOnes) {
  constexpr RequestId kRequests = 9;
  const auto run = [&](bool records) {
    Engine engine(*placed_, nullptr, {.max_sequences = 5, .capacity = 96, .record_steps = records});
    for (RequestId i = 0; i < kRequests; ++i) {
      Request request;
      for (std::int64_t t = 0; t < 6 + i % 3; ++t)
        request.prompt.push_back(
            static_cast<std::int32_t>((31 * i + 7 * t) % testing::kVocabularyOnGpu));
      // Sequences end while a step is on its way that has them, too.
      request.max_new_tokens = 30 + 5 * i;
      for (std::int32_t id = 0; id < testing::kVocabularyOnGpu; id += 31)
        request.stop_ids.push_back(id);
      request.sampling.seed = static_cast<std::uint64_t>(i);
      request.return_experts = i % 3 != 1;
      engine.submit(std::move(request));
    }
    testing::Answers answers;
    std::int64_t ahead = 0;
    for (std::int64_t step = 0; !engine.is_idle(); ++step) {
      if (step == 6) engine.preempt(2);
      for (Progress& progress : engine.step()) {
        if (progress.completion) answers.completions[progress.id] = std::move(*progress.completion);
      }
      answers.recorded += engine.last_pass().recorded;
      ahead += engine.last_pass().ahead;
    }
    EXPECT_EQ(answers.recorded > 0, records);
    EXPECT_EQ(ahead > 0, records);
    return answers;
  };
  const testing::Answers recorded = run(true), launched = run(false);
  std::int64_t same = 0, all = 0;
  for (const auto& [id, completion] : recorded.completions) {
    SCOPED_TRACE(id);
    const Completion& other = launched.completions.at(id);
    ASSERT_EQ(completion.output_ids, other.output_ids);
    ASSERT_EQ(completion.experts.size(), other.experts.size());
    EXPECT_EQ(completion.experts.empty(), id % 3 == 1);
    for (std::size_t i = 0; i < other.experts.size(); ++i)
      same += completion.experts[i] == other.experts[i];
    all += std::ssize(other.experts);
  }
  // In bf16 two experts may be nearly equal; those of another token would agree in one of 16.
  EXPECT_GT(static_cast<double>(same), 0.98 * static_cast<double>(all));
}

}  // namespace
}  // namespace heddle::rollout
