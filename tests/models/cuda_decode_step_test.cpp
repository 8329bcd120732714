// Recorded steps of a dense hybrid model whose layers are one kernel, on a GPU.
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <string>
#include <vector>

#include "base/errors.h"
#include "decode_step_models.h"

namespace heddle::rollout {
namespace {

using namespace testing;

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
  const Found found = generate(*one_, tasks, true, /*at_once=*/5);
  EXPECT_GT(found.recorded, 40);
  expect_near(found, tasks);
  expect_same_bits(found, generate(*one_, tasks, true, 5));
}

/// Steps where a number of the weight is not finite: prompts are read before that.
class GpuSpoiltDecodeStep : public GpuDecodeStep {
 protected:
  void expect_error(at::Tensor weight, float value, std::int64_t numbers, std::int64_t count,
                    const std::string& adapters = {}) {
    Engine engine(*one_, nullptr, {.max_sequences = count, .capacity = 640});
    for (std::int64_t i = 0; i < count; ++i) {
      Request request;
      request.prompt = prompt(i, 9);
      request.max_new_tokens = 8;
      request.adapter = set(*one_, adapters);
      engine.submit(std::move(request));
    }
    engine.step();
    ASSERT_FALSE(engine.last_pass().recorded);
    const at::Tensor before = weight.clone();
    weight.view(-1).narrow(0, 0, numbers).fill_(value);
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
  static bool is_of_two_layers(const std::string& name) {
    return name.find("layers.0.") != std::string::npos ||
           name.find("layers.3.") != std::string::npos;
  }
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kHuge = 1e38F;
};

TEST_F(GpuSpoiltDecodeStep, WeightsEndWithAnError) {
  std::map<std::string, at::Tensor> weights;
  one_->model->visit_parameters([&](nn::Parameter& parameter) {
    if (is_of_two_layers(parameter.name())) weights[parameter.name()] = parameter.data();
  });
  EXPECT_GT(weights.size(), 18U);
  for (auto& [name, weight] : weights) {
    for (const std::int64_t count : {1, 3, 8}) {
      SCOPED_TRACE(name + " " + std::to_string(count));
      expect_error(weight, kNan, 1, count);
      // A large weight of a norm before a head's, or of a gate, is a large number and no fault.
      if (name.find("mlp.down") != std::string::npos)
        expect_error(weight, kHuge, weight.numel(), count);
    }
  }
}

TEST_F(GpuSpoiltDecodeStep, FactorsEndWithAnError) {
  const std::string name = "8 all-linear";
  std::map<std::string, at::Tensor> factors;
  static_cast<const adapters::LoraSet&>(*set(*one_, name)->set)
      .visit_parameters([&](nn::Parameter& parameter) {
        if (is_of_two_layers(parameter.name())) factors[parameter.name()] = parameter.data();
      });
  EXPECT_EQ(factors.size(), 30U);
  for (auto& [factor, data] : factors) {
    for (const std::int64_t count : {1, 3, 8}) {
      SCOPED_TRACE(factor + " " + std::to_string(count));
      expect_error(data, kNan, 1, count, name);
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
  // Rows with adapters: the kernel takes ranks up to 64, of the layers' matrices.
  const auto with = [](std::vector<Task> tasks, const std::string& set) {
    tasks.at(1).set = set;
    return tasks;
  };
  for (const char* taken : {"64 all-linear", "5 q_proj in_proj_z"}) {
    const std::vector<Task> tasks = with(few, taken);
    EXPECT_TRUE(differ(generate(*one_, tasks), generate(*layers_, tasks))) << taken;
  }
  const std::vector<Task> wide = with(few, "65 all-linear");
  expect_same_bits(generate(*one_, wide), generate(*layers_, wide));
}

TEST_F(GpuDecodeStep, ChangesOfTheHeadAreLeftToTheLayers) {
  assembly::ModelOnRanks one = model("cuda.sm90.one_kernel", /*is_tied=*/false),
                         layers = model("layer_by_layer", /*is_tied=*/false);
  const auto tasks = [](const std::string& set) {
    return std::vector<Task>{{9, 6}, {9, 6, set}, {9, 6}};
  };
  for (const char* left : {"16 lm_head", "8 q_proj lm_head"}) {
    SCOPED_TRACE(left);
    expect_same_bits(generate(one, tasks(left)), generate(layers, tasks(left)));
  }
  const char* const taken = "16 all-linear";
  EXPECT_NE(generate(one, tasks(taken)).completions.at(0).logprobs,
            generate(layers, tasks(taken)).completions.at(0).logprobs);
}

}  // namespace
}  // namespace heddle::rollout
