// Memory of a critic, whose model differs from the policy's by the head (rl/critic.h).
#include <gtest/gtest.h>

#include "assembly/from_config.h"
#include "assembly/model_on_ranks.h"
#include "config/config.h"
#include "models/registry.h"
#include "plan/layout_report.h"
#include "plan/policy_config.h"

namespace heddle::plan {
namespace {

config::RunConfig critic_config(std::vector<std::string> settings) {
  settings.insert(settings.begin(), "rl.algorithm.advantage=gae");
  return policy_config(std::move(settings));
}

struct Elements {
  double all = 0, trained = 0;
};

/// Counts the model of a critic of one rank.
Elements elements_of_critic(config::RunConfig config, models::Config model) {
  config.model.head = models::Head::kClassify;
  config.model.num_labels = 1;
  assembly::ModelRecipe recipe = assembly::recipe_of_run(config, std::move(model));
  recipe.config.weights.classification_class = "critic";
  const assembly::ModelOnRanks placed =
      assembly::place(recipe, assembly::context_of_shapes(config));
  Elements elements;
  const auto add = [&](nn::Parameter& p) { elements.all += as_double(p.numel()); };
  placed.model->visit_parameters(add);
  if (placed.adapters) placed.adapters->visit_parameters(add);
  for (const nn::Parameter* p : placed.trainable) elements.trained += as_double(p->numel());
  return elements;
}

TEST(Critic, HasAHeadOfOneNumber) {
  // With a head of its own, and with one that is the embedding.
  for (const char* preset : {"qwen3.5-9b", "qwen3.5-0.8b", "small-moe"}) {
    for (const char* method : {"full", "lora"}) {
      const std::string lora = std::string("train.method=") + method;
      const config::RunConfig config = critic_config({lora});
      const auto model = models::preset(preset);
      const Elements critic = elements_of_critic(config, model);
      const Memory memory = plan_layout(config, model, 1).stages.at(0).memory;
      // Weights in bf16; gradient, moments and master of what is trained. Not counted: wide
      // parameters of two bytes more an element, and the final norm.
      EXPECT_NEAR(memory.others / (2 * critic.all + 16 * critic.trained), 1, 2e-4)
          << preset << ' ' << method;
    }
  }
}

TEST(Critic, IsDividedWithoutThePolicysHead) {
  const auto model = models::preset("qwen3.5-9b");
  const double table = 248320.0 * 4096;
  ASSERT_EQ(table, as_double(model.vocab_size * model.hidden_size));
  const auto others = [&](std::vector<std::string> layout, std::int64_t ranks, std::size_t stage) {
    return plan_layout(critic_config(std::move(layout)), model, ranks)
        .stages.at(stage)
        .memory.others;
  };
  // The first stage has the only table, the last one the head of one number. 18 bytes: weight,
  // gradient, moments and master.
  const config::RunConfig halves = critic_config({"parallel.pp=2"});
  const Step step = describe_step(halves, model);
  const StepOnRanks on_two(step, halves, 2);
  const auto blocks = [&](std::int64_t stage) {
    double elements = 0;
    for (const std::int64_t i : on_two.stages.layers_of(stage))
      elements += step.parameters[static_cast<std::size_t>(i)].dense(1);
    return elements;
  };
  EXPECT_DOUBLE_EQ(others({"parallel.pp=2"}, 2, 0), 18 * (blocks(0) + table));
  EXPECT_DOUBLE_EQ(others({"parallel.pp=2"}, 2, 1), 18 * (blocks(1) + 4096));
  // Ranks along fsdp and tp divide table and blocks.
  const double whole = others({}, 1, 0);
  EXPECT_DOUBLE_EQ(whole, 18 * (blocks(0) + blocks(1) + table + 4096));
  for (const char* layout : {"parallel.fsdp=4", "parallel.tp=4"})
    EXPECT_NEAR(others({layout}, 4, 0), whole / 4, 1e-3 * whole) << layout;
}

}  // namespace
}  // namespace heddle::plan
