// Generation by a dense hybrid model whose layers are one kernel, and by the layers' own kernels,
// on a GPU.
#pragma once

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "base/errors.h"
#include "ckpt/hf_adapter.h"
#include "models/answers.h"
#include "models/registry.h"
#include "ops/kernel_choice.h"
#include "rollout/engine.h"

namespace heddle::rollout::testing {

using heddle::testing::Answers;
using heddle::testing::answers_of;

constexpr std::int64_t kVocabulary = 770;  // not a multiple of the kernel's tiles

/// Layers of Qwen3.5-0.8B, which the kernel is compiled for, with random weights in bf16. No
/// kernel: the one that is taken by itself.
inline assembly::ModelOnRanks model(const std::string& kernel = "cuda.sm90.one_kernel",
                                    bool is_tied = true) {
  const nlohmann::ordered_json json = {
      {"model_type", "qwen3_5_text"}, {"vocab_size", kVocabulary},
      {"hidden_size", 1024},          {"intermediate_size", 3584},
      {"num_hidden_layers", 8},       {"num_attention_heads", 8},
      {"num_key_value_heads", 2},     {"head_dim", 256},
      {"linear_num_key_heads", 16},   {"linear_num_value_heads", 16},
      {"linear_key_head_dim", 128},   {"linear_value_head_dim", 128},
      {"initializer_range", 0.03},    {"tie_word_embeddings", is_tied}};
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

inline std::vector<std::int32_t> prompt(std::int64_t i, std::int64_t length) {
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < length; ++t)
    ids.push_back(static_cast<std::int32_t>((31 * i + 7 * t * t + t) % kVocabulary));
  return ids;
}

/// A prompt and how many tokens follow it, with a set of adapters or the base model.
struct Task {
  std::int64_t prompt, tokens;
  std::string set = {};
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

  /// The set of a name that is the rank and the targets: "16 all-linear", "8 q_proj v_proj"; an
  /// empty one is the base model. The same numbers in both models.
  std::shared_ptr<const Adapter> set(assembly::ModelOnRanks& of, const std::string& name) {
    if (name.empty()) return base_;
    std::shared_ptr<const Adapter>& made = sets_[{&of, name}];
    if (made) return made;
    std::istringstream words(name);
    adapters::LoraOptions options;
    words >> options.rank;
    options.alpha = 2 * static_cast<double>(options.rank);
    options.seed = std::hash<std::string>()(name);
    std::vector<std::string> targets;
    for (std::string target; words >> target;) targets.push_back(target);
    const auto own = make_set(of, targets, options);
    own->initialize();
    std::int64_t count = 0;
    own->visit_parameters([&](nn::Parameter& factor) {
      if (!factor.name().ends_with("lora_B.weight")) return;
      const at::Tensor data = factor.data();
      const at::Tensor places =
          at::arange(data.numel(), data.options().dtype(at::kDouble)).view(data.sizes());
      data.copy_(at::sin(places * 1.7 + static_cast<double>(++count)) * 0.02);
    });
    return made = std::make_shared<const Adapter>(Adapter{name, 0, own});
  }

  /// A set of targets, or of the modules themselves where one is the head, which is no target.
  static std::shared_ptr<adapters::LoraSet> make_set(assembly::ModelOnRanks& of,
                                                     const std::vector<std::string>& targets,
                                                     const adapters::LoraOptions& options) {
    const adapters::Adaptable adaptable = ckpt::adaptable(*of.model);
    if (std::find(targets.begin(), targets.end(), "lm_head") == targets.end())
      return std::make_shared<adapters::LoraSet>(adaptable, targets, std::vector<std::string>{},
                                                 options, of.context);
    std::vector<adapters::LoraSet::Module> modules;
    of.model->visit_linears([&](nn::Linear& linear) {
      for (const std::string& target : targets) {
        if (linear.module().ends_with(target))
          modules.push_back({linear.module(), options.rank, options.scaling()});
      }
    });
    return std::make_shared<adapters::LoraSet>(adaptable, modules, options, of.context);
  }

  using Found = Answers;
  /// `prompts_apart`: a step after each request, so that the first prompt is read alone. A prompt's
  /// bits may differ with the sets of those beside it (ops/grouped_low_rank/cuda/README.md).
  Found generate(assembly::ModelOnRanks& with, const std::vector<Task>& tasks, bool records = true,
                 std::int64_t at_once = 0, bool prompts_apart = false) {
    Engine engine(with, nullptr,
                  {.max_sequences = at_once > 0 ? at_once : std::ssize(tasks),
                   .capacity = 640,
                   .record_steps = records});
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      Request request;
      request.prompt = prompt(static_cast<std::int64_t>(i), tasks[i].prompt);
      request.max_new_tokens = tasks[i].tokens;
      request.sampling.temperature = 0;
      request.adapter = set(with, tasks[i].set);
      engine.submit(std::move(request));
      if (prompts_apart) engine.step();
    }
    return answers_of(engine);
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
      request.adapter = set(*layers_, tasks[i].set);
      engine.submit(std::move(request));
    }
    Distance distance;
    std::int64_t count = 0;
    const Found whole = answers_of(engine);
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
  void expect_near(const Found& found, const std::vector<Task>& tasks, double most_missed = 0.1) {
    const Distance own = judged(found, tasks), others = judged(generate(*layers_, tasks), tasks);
    RecordProperty("mean_e6", static_cast<int>(own.mean * 1e6));
    RecordProperty("others_mean_e6", static_cast<int>(others.mean * 1e6));
    EXPECT_GT(own.mean, 0);
    EXPECT_LT(own.mean, 2 * others.mean);
    EXPECT_LT(own.largest, 2 * others.largest);
    EXPECT_LE(own.missed, most_missed);
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
  std::map<std::pair<const assembly::ModelOnRanks*, std::string>, std::shared_ptr<const Adapter>>
      sets_;
};

}  // namespace heddle::rollout::testing
