#include "models/layer_shape.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "models/model.h"
#include "models/registry.h"

namespace heddle::models {
namespace {

using Along = Cut::Along;

/// The dimension of a matrix that the ranks along tp divide.
Along cut_of(const nn::Parameter& parameter) {
  const std::int64_t matrix = std::ssize(parameter.global_shape()) - 2;
  for (const nn::Shard& shard : parameter.placement()) {
    if (shard.mesh_dim == comm::Dim::kTp)
      return shard.tensor_dim == matrix ? Along::kOut : Along::kIn;
  }
  return Along::kNothing;
}

class EachPreset : public ::testing::TestWithParam<std::string> {};

/// The layer's products, which costs and layout checks read, are those of its modules.
TEST_P(EachPreset, ProductsAreThoseOfTheModules) {
  Config config = preset(GetParam());
  config.vocab_size = 64;
  // One layer of each kind says it all.
  if (config.layers.size() > 4) config.layers.resize(4);
  ModelOptions options;
  options.kernel_policy.allow_fallback = true;
  Model model(config, "model.", runtime::Context(), options);
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    std::map<std::string, const nn::Parameter*> found;
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    const auto add = [&](const nn::Parameter& parameter) {
      std::string name = parameter.name().substr(prefix.size());
      if (name.ends_with(".weight")) name.resize(name.size() - std::string(".weight").size());
      found[name] = &parameter;
    };
    model.layers()[i]->visit_linears([&](nn::Linear& linear) { add(linear.weight()); });
    model.layers()[i]->visit_expert_weights(
        [&](nn::ExpertWeights& experts) { add(experts.weight()); });
    for (const Product& product : config.layers[i].products()) {
      ASSERT_TRUE(found.contains(product.name)) << product.name;
      const nn::Parameter& parameter = *found[product.name];
      const std::vector<std::int64_t> matrix(parameter.global_shape().end() - 2,
                                             parameter.global_shape().end());
      EXPECT_EQ(matrix, (std::vector<std::int64_t>{product.out, product.in})) << product.name;
      EXPECT_EQ(cut_of(parameter), product.cut.along) << product.name;
      found.erase(product.name);
    }
    EXPECT_TRUE(found.empty()) << found.begin()->first;
  }
}

/// So that `heddle init` writes every value and nothing hangs on a default.
TEST_P(EachPreset, LeavesNoValueOut) {
  EXPECT_TRUE(preset(GetParam()).defaulted.empty()) << preset(GetParam()).defaulted.front();
}

INSTANTIATE_TEST_SUITE_P(, EachPreset, ::testing::ValuesIn(preset_names()), [](const auto& info) {
  std::string name = info.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; }, '_');
  return name;
});

TEST(Presets, HaveNamesOfTheirOwn) {
  const std::vector<std::string> names = preset_names();
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), names.size());
}

}  // namespace
}  // namespace heddle::models
