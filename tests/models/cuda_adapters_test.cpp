// Recorded steps whose rows have any sets of adapters, on a GPU.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>

#include "ckpt/hf_adapter.h"
#include "models/registry.h"
#include "rollout/engine.h"

namespace heddle::rollout {
namespace {

constexpr std::int64_t kVocabulary = 512;

assembly::ModelOnRanks model_on_gpu() {
  // The heads' sizes are those of the published models.
  const nlohmann::ordered_json json = {
      {"model_type", "qwen3_5_text"}, {"vocab_size", kVocabulary},
      {"hidden_size", 256},           {"intermediate_size", 640},
      {"num_hidden_layers", 4},       {"num_attention_heads", 4},
      {"num_key_value_heads", 2},     {"head_dim", 256},
      {"linear_num_key_heads", 2},    {"linear_num_value_heads", 4},
      {"linear_key_head_dim", 128},   {"linear_value_head_dim", 128},
      {"initializer_range", 0.05},    {"tie_word_embeddings", true}};
  runtime::Context context;
  context.device = c10::Device(c10::DeviceType::CUDA, 0);
  context.dtype = at::kBFloat16;
  context.seed = 5;
  assembly::ModelRecipe recipe;
  recipe.config = models::parse_config(json, "test");
  recipe.purpose = assembly::Purpose::kGenerate;
  recipe.weights = assembly::Weights::kRandom;
  assembly::NewAdapters adapters;
  adapters.targets = {"all-linear"};
  recipe.adapters = adapters;
  return assembly::place(recipe, context);
}

class GpuAdaptersOfRequests : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or libtorch_cuda is not linked";
    placed_.emplace(model_on_gpu());
    adapters_ = {set({"all-linear"}, 16), set({"q_proj", "v_proj"}, 8), set({"all-linear"}, 64),
                 set({"gate_proj", "down_proj"}, 1),
                 std::make_shared<const Adapter>(Adapter{"base", 0, nullptr})};
  }

  std::shared_ptr<const Adapter> set(const std::vector<std::string>& targets, std::int64_t rank) {
    adapters::LoraOptions options;
    options.rank = rank;
    options.alpha = 2.0 * static_cast<double>(rank);
    auto own =
        std::make_shared<adapters::LoraSet>(ckpt::adaptable(*placed_->model), targets,
                                            std::vector<std::string>{}, options, placed_->context);
    own->initialize();
    own->visit_parameters([](nn::Parameter& factor) {
      if (factor.name().ends_with("lora_B.weight")) factor.data().normal_(0, 0.05);
    });
    return std::make_shared<const Adapter>(Adapter{targets[0] + std::to_string(rank), 0, own});
  }

  struct Found {
    std::map<RequestId, Completion> completions;
    std::int64_t recorded = 0, launched = 0;  ///< Steps that draw.
  };
  /// Answers to `count` requests, request i with adapter of_request(i).
  template <class F>
  Found generate(std::int64_t count, const F& of_request, bool records = true) {
    Engine engine(*placed_, nullptr,
                  {.max_sequences = count, .capacity = 64, .record_steps = records});
    for (std::int64_t i = 0; i < count; ++i) {
      Request request;
      for (std::int64_t t = 0; t < 4 + i % 3; ++t)
        request.prompt.push_back(static_cast<std::int32_t>((31 * i + 7 * t) % kVocabulary));
      request.max_new_tokens = 12;
      request.sampling.seed = static_cast<std::uint64_t>(i);
      request.adapter = adapters_.at(static_cast<std::size_t>(of_request(i)));
      engine.submit(std::move(request));
    }
    Found found;
    while (!engine.is_idle()) {
      for (Progress& progress : engine.step()) {
        if (progress.completion) found.completions[progress.id] = std::move(*progress.completion);
      }
      if (engine.last_pass().draws)
        ++(engine.last_pass().recorded ? found.recorded : found.launched);
    }
    return found;
  }

  /// Tokens until the first that differs, whose log-probabilities are near: another order of sums
  /// draws another token now and then.
  static std::size_t agreeing(const Completion& found, const Completion& expected) {
    std::size_t t = 0;
    while (t < found.output_ids.size() && found.output_ids[t] == expected.output_ids[t]) {
      EXPECT_NEAR(found.logprobs[t], expected.logprobs[t], 0.15) << t;
      ++t;
    }
    return t;
  }

  std::optional<assembly::ModelOnRanks> placed_;
  std::vector<std::shared_ptr<const Adapter>> adapters_;
};

TEST_F(GpuAdaptersOfRequests, ShareARecordedStep) {
  for (const std::int64_t count : {7, 30}) {
    const auto mixed = [](std::int64_t i) { return i % 5; };
    const Found found = generate(count, mixed), again = generate(count, mixed),
                launched = generate(count, mixed, /*records=*/false);
    EXPECT_EQ(found.recorded, 11) << count;
    EXPECT_EQ(found.launched, 0) << count;
    EXPECT_EQ(launched.recorded, 0) << count;
    std::size_t agreed = 0, all = 0;
    for (const auto& [id, completion] : found.completions) {
      EXPECT_EQ(completion.output_ids, again.completions.at(id).output_ids) << count << " " << id;
      EXPECT_EQ(completion.logprobs, again.completions.at(id).logprobs) << count << " " << id;
      agreed += agreeing(completion, launched.completions.at(id));
      all += completion.output_ids.size();
    }
    EXPECT_GT(2 * agreed, all) << count;
  }
}

TEST_F(GpuAdaptersOfRequests, AreThoseOfTheirOwnSet) {
  constexpr std::int64_t kRequests = 10;
  const Found mixed = generate(kRequests, [](std::int64_t i) { return i % 5; });
  std::size_t agreed = 0, all = 0;
  for (std::int64_t a = 0; a < 5; ++a) {
    const Found alone = generate(kRequests, [a](std::int64_t) { return a; });
    for (std::int64_t i = 0; i < kRequests; ++i) {
      const Completion& found = mixed.completions.at(i);
      if (i % 5 == a) {
        agreed += agreeing(found, alone.completions.at(i));
        all += found.output_ids.size();
      } else {
        EXPECT_NE(found.logprobs, alone.completions.at(i).logprobs) << i << " " << a;
      }
    }
  }
  EXPECT_GT(2 * agreed, all);
}

TEST_F(GpuAdaptersOfRequests, TakeTheSlotsOfSetsThatAreGone) {
  // More sets than there are slots, one after another at the addresses of old ones.
  Engine engine(*placed_, nullptr, {.max_sequences = 2, .capacity = 64});
  for (int round = 0; round < 5; ++round) {
    adapters_[0] = set({"all-linear"}, 16);
    std::vector<std::vector<double>> found;
    for (Engine* one : {&engine, static_cast<Engine*>(nullptr)}) {
      std::optional<Engine> fresh;
      if (one == nullptr)
        one = &fresh.emplace(*placed_, nullptr, EngineOptions{.max_sequences = 2, .capacity = 64});
      for (const std::size_t adapter : {0, 2}) {
        Request request;
        request.prompt = {5, 6, 7};
        request.max_new_tokens = 6;
        request.adapter = adapters_[adapter];
        one->submit(request);
      }
      while (!one->is_idle()) {
        for (Progress& progress : one->step())
          if (progress.completion) found.push_back(progress.completion->logprobs);
      }
    }
    ASSERT_EQ(found.size(), 4U);
    EXPECT_EQ(found[0], found[2]) << round;
    EXPECT_EQ(found[1], found[3]) << round;
  }
}

}  // namespace
}  // namespace heddle::rollout
