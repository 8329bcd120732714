// Arguments of decode_step for a model and its rows' adapters.
#include "models/decode_step_model.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "tiny_model.h"

namespace heddle::models {
namespace {

class DecodeStepModelTest : public ::testing::Test {
 protected:
  DecodeStepModelTest()
      : model_(testing::tiny_model(at::kFloat, false, at::kCPU)),
        cache_(model_->make_cache({.slots = 2, .pages = 2, .page_tokens = 8})) {}

  /// Rows' adapters that change the modules whose names end so; a slot's number tells the module.
  nn::RowAdapters adapters(const std::vector<std::string>& endings) {
    nn::RowAdapters adapters{at::zeros({1, 4}, at::kInt), 16, {}, {}};
    model_->visit_linears([&](nn::Linear& linear) {
      for (const std::string& ending : endings) {
        if (!linear.module().ends_with(ending)) continue;
        numbers_[linear.module()] = ++count_;
        adapters.layers.emplace(&linear, at::full({2, 3}, count_, at::kLong));
      }
    });
    return adapters;
  }
  /// The module of slots; empty without.
  std::string module_of(const at::Tensor& slots) const {
    if (!slots.defined()) return {};
    for (const auto& [module, number] : numbers_) {
      if (slots[0][0].item<std::int64_t>() == number) return module.substr(module.rfind('.') + 1);
    }
    return "unknown";
  }

  std::unique_ptr<Model> model_;
  nn::Cache cache_;
  std::map<std::string, std::int64_t> numbers_;
  std::int64_t count_ = 0;
};

TEST_F(DecodeStepModelTest, HasSlotsOfEachMatrix) {
  const nn::RowAdapters all =
      adapters({"_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"});
  const auto step = decode_step_model(*model_, cache_, &all);
  ASSERT_TRUE(step.has_value());
  EXPECT_EQ(step->rank, 16);
  EXPECT_TRUE(step->runs.defined());
  for (const ops::DecodeStep::Layer& layer : step->layers) {
    std::vector<std::string> names;
    for (const at::Tensor& slots : layer.slots) names.push_back(module_of(slots));
    const std::vector<std::string> expected =
        layer.keys.defined()
            ? std::vector<std::string>{"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                       "gate_proj", "up_proj", "down_proj"}
            : std::vector<std::string>{"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a",
                                       "out_proj",    "gate_proj", "up_proj",   "down_proj"};
    EXPECT_EQ(names, expected);
  }
}

TEST_F(DecodeStepModelTest, SlotsOfOtherMatricesAreUndefined) {
  const nn::RowAdapters some = adapters({"q_proj", "down_proj"});
  const auto step = decode_step_model(*model_, cache_, &some);
  ASSERT_TRUE(step.has_value());
  for (const ops::DecodeStep::Layer& layer : step->layers) {
    for (std::size_t i = 0; i < layer.slots.size(); ++i) {
      const bool is_changed = i + 1 == layer.slots.size() || (layer.keys.defined() && i == 0);
      EXPECT_EQ(layer.slots[i].defined(), is_changed) << i;
    }
  }
}

TEST_F(DecodeStepModelTest, HasNothingOfChangesOfTheHead) {
  const nn::RowAdapters head = adapters({"q_proj", "lm_head"});
  EXPECT_FALSE(decode_step_model(*model_, cache_, &head).has_value());
}

TEST_F(DecodeStepModelTest, TheBaseModelHasNone) {
  const auto step = decode_step_model(*model_, cache_, nullptr);
  ASSERT_TRUE(step.has_value());
  EXPECT_FALSE(step->runs.defined());
  for (const ops::DecodeStep::Layer& layer : step->layers) EXPECT_TRUE(layer.slots.empty());
}

}  // namespace
}  // namespace heddle::models
