// Parameters of adapters: those that a start of the run makes.
#include <gtest/gtest.h>

#include "assembly/from_config.h"
#include "assembly/model_on_ranks.h"
#include "base/errors.h"
#include "config/config.h"
#include "models/registry.h"
#include "plan/dry_run.h"
#include "plan/layout_report.h"
#include "testing/message_of.h"

namespace heddle::plan {
namespace {

config::RunConfig lora_config(std::vector<std::string> settings) {
  settings.insert(settings.begin(),
                  {"model.dtype=bfloat16", "data.max_length=4096", "train.micro_batch_tokens=4096",
                   "train.global_batch_size=8", "train.recompute=full", "train.method=lora"});
  return config::parse("", "test", settings, config::Completeness::kPartial);
}

const std::string kExperts = "adapter.target_parameters=[experts.gate_up_proj,experts.down_proj]";

/// Elements of adapters in all layers.
double counted(const Step& step) {
  double elements = 0;
  for (const ParameterCount& count : step.adapters) elements += count.on_rank(1, 1);
  return elements;
}

/// Elements that one rank of a run trains.
double trained(const config::RunConfig& config, const models::Config& model) {
  const assembly::ModelOnRanks placed =
      assembly::place(assembly::recipe_of_run(config, model), assembly::context_of_shapes(config));
  double elements = 0;
  for (const nn::Parameter* parameter : placed.trainable) elements += as_double(parameter->numel());
  return elements;
}

TEST(AdapterCounts, AreThoseOfWhatARunTrains) {
  const std::vector<std::vector<std::string>> targets = {
      {},
      {"adapter.rank=3"},
      {"adapter.targets=[q_proj,mlp.shared_expert.down_proj]"},
      {"adapter.targets=[servable]"},
      {"adapter.targets=[\"*.layers.3.self_attn.*\"]"},
      {kExperts},
      {kExperts, "adapter.shared_expert_factors=true"},
      {"adapter.target_parameters=[layers.1.mlp.experts.down_proj]", "adapter.targets=[o_proj]"}};
  for (const char* preset : {"small-moe", "qwen3.5-35b-a3b"}) {
    const auto model = models::preset(preset);
    for (const std::vector<std::string>& settings : targets) {
      const config::RunConfig config = lora_config(settings);
      const std::string name = settings.empty() ? "all-linear" : settings.front();
      EXPECT_EQ(counted(describe_step(config, model)), trained(config, model))
          << preset << ' ' << name;
    }
  }
  // all-linear leaves out the dense MLPs of this one.
  const auto mixed = models::preset("qwen3-30b-a3b");
  EXPECT_EQ(counted(describe_step(lora_config({}), mixed)), trained(lora_config({}), mixed));
  const auto dense = models::preset("qwen3.5-0.8b");
  EXPECT_EQ(counted(describe_step(lora_config({}), dense)), trained(lora_config({}), dense));
  EXPECT_EQ(counted(describe_step(lora_config({"train.method=full"}), dense)), 0);
}

TEST(AdapterCounts, ATargetThatMatchesNothingIsRefusedAsAtAStart) {
  const auto model = models::preset("small-moe");
  const config::RunConfig config = lora_config({"adapter.targets=[q_prjo]"});
  const std::string said = testing::message_of([&] { trained(config, model); });
  EXPECT_EQ(said.find("adapter.targets: 'q_prjo' matches no linear layer"), 0u) << said;
  EXPECT_EQ(testing::message_of([&] { plan_layout(config, model, 1); }), said);
}

TEST(AdapterCounts, FactorsOfExpertsHaveGradientsAndMoments) {
  const auto model = models::preset("qwen3.5-35b-a3b");
  const auto memory = [&](std::vector<std::string> settings, std::int64_t ranks = 1) {
    return plan_layout(lora_config(std::move(settings)), model, ranks).stages.at(0).memory;
  };
  // A of [256, 16, 2048] and B of [256, 1024, 16] beside gate_up_proj, A of [256, 16, 512] and B of
  // [256, 2048, 16] beside down_proj, in 40 layers.
  const double all = 40.0 * 256 * 16 * (2048 + 1024 + 512 + 2048);
  const Memory linears = memory({}), experts = memory({kExperts});
  EXPECT_DOUBLE_EQ(experts.weights - linears.weights, 2 * all);
  EXPECT_DOUBLE_EQ(experts.gradients - linears.gradients, 4 * all);
  EXPECT_DOUBLE_EQ(experts.optimizer - linears.optimizer, 12 * all);
  // One factor for all experts on the side of the hidden states.
  const Memory shared = memory({kExperts, "adapter.shared_expert_factors=true"});
  EXPECT_DOUBLE_EQ(shared.optimizer - linears.optimizer,
                   12 * 40.0 * 16 * (2048 + 256 * 1024 + 256 * 512 + 2048));
  // Ranks along ep divide them as the experts.
  EXPECT_DOUBLE_EQ(memory({kExperts, "parallel.dp=8", "parallel.ep=8"}, 8).optimizer -
                       memory({"parallel.dp=8", "parallel.ep=8"}, 8).optimizer,
                   12 * all / 8);
}

TEST(AdapterCounts, AgreeWithTheObjectsOfADryRun) {
  const auto model = models::preset("small-moe");
  // A factor that experts share is one row, which one of the ranks that divide rows owns.
  const double shared_state = 12.0 * 8 * 16 * (256 + 256);
  for (const std::vector<std::string>& layout : std::vector<std::vector<std::string>>{
           {"parallel.dp=1"},
           {"parallel.dp=2"},
           {"parallel.fsdp=2"},
           {"parallel.tp=2"},
           {"parallel.dp=2", "parallel.ep=2"},
           {"parallel.dp=4", "parallel.ep=2"},
           {"parallel.tp=2", "parallel.ep=2"},
           {"parallel.fsdp=2", "parallel.dp=2", "parallel.ep=2"}}) {
    for (const char* shares : {"false", "true"}) {
      struct Found {
        Memory memory;
        DryRank made;
      };
      const auto found = [&](std::vector<std::string> more) {
        more.insert(more.end(), layout.begin(), layout.end());
        const config::RunConfig config = lora_config(more);
        const auto& p = config.parallel;
        const std::int64_t world = p.tp * p.fsdp.value * p.dp.value;
        return Found{plan_layout(config, model, world).stages.at(0).memory,
                     dry_run(config, model, world).stages.at(0)};
      };
      const Found linears = found({}),
                  experts =
                      found({kExperts, std::string("adapter.shared_expert_factors=") + shares});
      const std::string name = layout.front() + ' ' + layout.back() + ", shared " + shares;
      const bool is_shared = std::string(shares) == "true";
      EXPECT_NEAR(experts.memory.optimizer, experts.made.optimizer,
                  0.002 * experts.made.optimizer + (is_shared ? shared_state : 0))
          << name;
      const bool divides = layout.front() == "parallel.fsdp=2" || layout.back() == "parallel.tp=2";
      if (divides) continue;
      EXPECT_DOUBLE_EQ(experts.memory.gradients, experts.made.gradients) << name;
      EXPECT_NEAR(experts.memory.weights - linears.memory.weights,
                  experts.made.resident - linears.made.resident, is_shared ? shared_state / 6 : 1)
          << name;
    }
  }
}

}  // namespace
}  // namespace heddle::plan
