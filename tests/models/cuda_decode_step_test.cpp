// Recorded steps of a dense hybrid model whose layers are one kernel, on a GPU.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "base/errors.h"
#include "ckpt/hf_adapter.h"
#include "models/answers.h"
#include "models/registry.h"
#include "ops/kernel_choice.h"
#include "rollout/engine.h"

namespace heddle::rollout {
namespace {

constexpr std::int64_t kVocabulary = 770;  // not a multiple of the kernel's tiles

/// Layers of Qwen3.5-0.8B, which the kernel is compiled for, with random weights in bf16. No
/// kernel: the one that is taken by itself.
assembly::ModelOnRanks model(const std::string& kernel = "cuda.sm90.one_kernel") {
  const nlohmann::ordered_json json = {
      {"model_type", "qwen3_5_text"}, {"vocab_size", kVocabulary},
      {"hidden_size", 1024},          {"intermediate_size", 3584},
      {"num_hidden_layers", 8},       {"num_attention_heads", 8},
      {"num_key_value_heads", 2},     {"head_dim", 256},
      {"linear_num_key_heads", 16},   {"linear_num_value_heads", 16},
      {"linear_key_head_dim", 128},   {"linear_value_head_dim", 128},
      {"initializer_range", 0.03},    {"tie_word_embeddings", true}};
  runtime::Context context;
  context.device = c10::Device(c10::DeviceType::CUDA, 0);
  context.dtype = at::kBFloat16;
  context.seed = 11;
  assembly::ModelRecipe recipe;
  recipe.config = models::parse_config(json, "test");
  recipe.purpose = assembly::Purpose::kGenerate;
  recipe.weights = assembly::Weights::kRandom;
  assembly::NewAdapters adapters;
  adapters.targets = {"all-linear"};
  recipe.adapters = std::move(adapters);
  if (!kernel.empty()) recipe.kernels.named = {{"decode_step", kernel}};
  return assembly::place(recipe, context);
}

std::vector<std::int32_t> prompt(std::int64_t i, std::int64_t length) {
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < length; ++t)
    ids.push_back(static_cast<std::int32_t>((31 * i + 7 * t * t + t) % kVocabulary));
  return ids;
}

/// A prompt and how many tokens follow it.
struct Task {
  std::int64_t prompt, tokens;
};

class GpuDecodeStep : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device, or libtorch_cuda is not linked";
    one_.emplace(model());
    if (!ops::chose(one_->model->kernels(), "decode_step", "cuda.sm90.one_kernel"))
      GTEST_SKIP() << "the device does not run the kernel";
    layers_.emplace(model("layer_by_layer"));
    base_ = std::make_shared<const Adapter>(Adapter{"base", 0, nullptr});
  }

  std::shared_ptr<const Adapter> set(assembly::ModelOnRanks& of) {
    adapters::LoraOptions options;
    options.rank = 8;
    options.alpha = 16;
    auto own = std::make_shared<adapters::LoraSet>(ckpt::adaptable(*of.model),
                                                   std::vector<std::string>{"all-linear"},
                                                   std::vector<std::string>{}, options, of.context);
    own->initialize();
    own->visit_parameters([&](nn::Parameter& factor) {
      if (factor.name().ends_with("lora_B.weight")) factor.data().fill_(0.01);
    });
    return std::make_shared<const Adapter>(Adapter{"set", 0, own});
  }

  using Found = testing::Answers;
  Found generate(assembly::ModelOnRanks& with, const std::vector<Task>& tasks, bool records = true,
                 const std::shared_ptr<const Adapter>& adapter = nullptr,
                 std::int64_t at_once = 0) {
    Engine engine(with, nullptr,
                  {.max_sequences = at_once > 0 ? at_once : std::ssize(tasks),
                   .capacity = 640,
                   .record_steps = records});
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      Request request;
      request.prompt = prompt(static_cast<std::int64_t>(i), tasks[i].prompt);
      request.max_new_tokens = tasks[i].tokens;
      request.sampling.temperature = 0;
      request.adapter = adapter ? adapter : base_;
      engine.submit(std::move(request));
    }
    return testing::answers_of(engine);
  }

  /// Distances of log-probabilities from those of one launched pass over the whole text.
  struct Distance {
    double mean = 0, largest = 0;
    double missed = 0;  ///< By which a token is less likely there than the most likely one.
  };
  Distance judged(const Found& found, const std::vector<Task>& tasks) {
    Engine engine(*layers_, nullptr,
                  {.max_sequences = std::ssize(tasks), .capacity = 640, .record_steps = false});
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      Request request;
      request.prompt = prompt(static_cast<std::int64_t>(i), tasks[i].prompt);
      const auto& ids = found.completions.at(static_cast<RequestId>(i)).output_ids;
      request.prompt.insert(request.prompt.end(), ids.begin(), ids.end());
      request.max_new_tokens = 1;
      request.prompt_logprobs = 1;
      request.adapter = base_;
      engine.submit(std::move(request));
    }
    Distance distance;
    std::int64_t count = 0;
    const Found whole = testing::answers_of(engine);
    for (const auto& [id, completion] : found.completions) {
      const auto first = static_cast<std::size_t>(tasks[static_cast<std::size_t>(id)].prompt);
      const Completion& judge = whole.completions.at(id);
      for (std::size_t t = 0; t < completion.logprobs.size(); ++t, ++count) {
        const double expected = judge.prompt_logprobs.at(first + t),
                     off = std::abs(completion.logprobs[t] - expected);
        distance.mean += off;
        distance.largest = std::max(distance.largest, off);
        distance.missed = std::max(
            distance.missed, judge.prompt_top_logprobs.at(first + t).at(0).logprob - expected);
      }
    }
    distance.mean /= static_cast<double>(count);
    return distance;
  }

  /// Expects that the kernel's answers are as near to a launched pass as those of the layers' own
  /// kernels, recorded too.
  void expect_near(const Found& found, const std::vector<Task>& tasks) {
    const Distance own = judged(found, tasks), others = judged(generate(*layers_, tasks), tasks);
    RecordProperty("mean_e6", static_cast<int>(own.mean * 1e6));
    RecordProperty("others_mean_e6", static_cast<int>(others.mean * 1e6));
    EXPECT_GT(own.mean, 0);
    EXPECT_LT(own.mean, 2 * others.mean);
    EXPECT_LT(own.largest, 2 * others.largest);
    EXPECT_LT(own.missed, 0.1);
  }
  static void expect_same_bits(const Found& found, const Found& again) {
    ASSERT_EQ(found.completions.size(), again.completions.size());
    for (const auto& [id, completion] : found.completions) {
      EXPECT_EQ(completion.output_ids, again.completions.at(id).output_ids) << id;
      EXPECT_EQ(completion.logprobs, again.completions.at(id).logprobs) << id;
    }
  }

  std::optional<assembly::ModelOnRanks> one_, layers_;
  std::shared_ptr<const Adapter> base_;
};

TEST_F(GpuDecodeStep, AnswersAreThoseOfLaunchedPasses) {
  // Each bucket of rows, full and filled up; contexts over the borders of pages and of recordings.
  const std::vector<std::vector<Task>> all = {
      {{1, 40}},
      {{500, 24}, {31, 40}},
      {{5, 30}, {64, 30}, {200, 30}},
      {{33, 20}, {32, 20}, {31, 20}, {30, 20}, {129, 20}, {3, 20}, {70, 20}, {2, 20}}};
  for (const std::vector<Task>& tasks : all) {
    SCOPED_TRACE(std::to_string(tasks.size()));
    const Found found = generate(*one_, tasks);
    EXPECT_EQ(found.launched, 0);
    expect_near(found, tasks);
    expect_same_bits(found, generate(*one_, tasks));
  }
}

TEST_F(GpuDecodeStep, SequencesComeAndGo) {
  // Fewer at once than there are: each end changes the rows, and slots and pages are used again.
  std::vector<Task> tasks;
  for (std::int64_t i = 0; i < 14; ++i) tasks.push_back({1 + 17 * i % 61, 3 + 7 * i % 23});
  const Found found = generate(*one_, tasks, true, nullptr, /*at_once=*/5);
  EXPECT_GT(found.recorded, 40);
  expect_near(found, tasks);
  expect_same_bits(found, generate(*one_, tasks, true, nullptr, 5));
}

TEST_F(GpuDecodeStep, NumbersThatAreNotFiniteEndWithAnError) {
  // Prompts are read by the layers' own kernels: weights are spoilt after that.
  std::map<std::string, at::Tensor> weights;
  one_->model->visit_parameters([&](nn::Parameter& parameter) {
    const std::string& name = parameter.name();
    if (name.find("layers.0.") != std::string::npos || name.find("layers.3.") != std::string::npos)
      weights[name] = parameter.data();
  });
  EXPECT_GT(weights.size(), 18U);
  const float nan = std::numeric_limits<float>::quiet_NaN(), huge = 1e38F;
  for (auto& [name, weight] : weights) {
    for (const float value : {nan, huge}) {
      // A large weight of a norm before a head's, or of a gate, is a large number and no fault.
      if (value == huge && name.find("mlp.down") == std::string::npos) continue;
      for (const std::int64_t count : {1, 3, 8}) {
        SCOPED_TRACE(name + " " + std::to_string(value) + " " + std::to_string(count));
        Engine engine(*one_, nullptr, {.max_sequences = count, .capacity = 640});
        for (std::int64_t i = 0; i < count; ++i) {
          Request request;
          request.prompt = prompt(i, 9);
          request.max_new_tokens = 8;
          request.adapter = base_;
          engine.submit(std::move(request));
        }
        engine.step();
        ASSERT_FALSE(engine.last_pass().recorded);
        const at::Tensor before = weight.clone();
        weight.view(-1).narrow(0, 0, value == huge ? weight.numel() : 1).fill_(value);
        try {
          engine.step();
          ADD_FAILURE() << "no error";
        } catch (const ModelError& error) {
          const bool names =
              std::string(error.what()).find("the logits are not finite") != std::string::npos;
          EXPECT_TRUE(names) << error.what();
        }
        weight.copy_(before);
      }
    }
  }
}

TEST_F(GpuDecodeStep, TheTableSaysWhatRuns) {
  EXPECT_TRUE(ops::chose(model("").model->kernels(), "decode_step", "cuda.sm90.one_kernel"));
  EXPECT_TRUE(ops::chose(layers_->model->kernels(), "decode_step", "layer_by_layer"));
  const std::vector<Task> few(3, {9, 6}), many(9, {9, 6});
  const auto differ = [&](const Found& found, const Found& other) {
    return found.completions.at(0).logprobs != other.completions.at(0).logprobs;
  };
  EXPECT_TRUE(differ(generate(*one_, few), generate(*layers_, few)));
  // Steps that the kernel leaves to the layers, as its row of docs/kernels.md says.
  expect_same_bits(generate(*one_, many), generate(*layers_, many));
  expect_same_bits(generate(*one_, few, false), generate(*layers_, few, false));
  expect_same_bits(generate(*one_, few, true, set(*one_)),
                   generate(*layers_, few, true, set(*layers_)));
}

}  // namespace
}  // namespace heddle::rollout
