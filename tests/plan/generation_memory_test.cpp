// Memory of ranks that train a policy, while they generate.
#include <gtest/gtest.h>

#include <algorithm>

#include "assembly/from_config.h"
#include "assembly/model_on_ranks.h"
#include "config/config.h"
#include "models/registry.h"
#include "plan/dry_run.h"
#include "plan/layout_report.h"
#include "plan/policy_config.h"
#include "plan/search.h"
#include "testing/message_of.h"

namespace heddle::plan {
namespace {

Memory memory_of_run(const char* preset, std::vector<std::string> settings, std::int64_t ranks = 1,
                     const std::optional<Hardware>& hardware = {}) {
  return plan_layout(policy_config(std::move(settings)), models::preset(preset), ranks, hardware)
      .stages.at(0)
      .memory;
}

/// A byte of each element of the experts of 35B-A3B: 40 layers of 256 of three matrices.
constexpr double kExperts = 40.0 * 256 * 3 * 2048 * 512;

TEST(GenerationMemory, ExpertsInEightBitsStaySoWhileTheirRankGenerates) {
  const auto memory = [](std::vector<std::string> settings,
                         const std::optional<Hardware>& hardware = {}) {
    settings.emplace_back("train.method=lora");
    return memory_of_run("qwen3.5-35b-a3b", std::move(settings), 1, hardware);
  };
  const std::string eight = "kernels.fp8=true", named = "kernels.frozen_experts=cuda.fp8";
  const Memory whole = memory({}), halved = memory({eight});
  EXPECT_DOUBLE_EQ(whole.weights - halved.weights, kExperts);
  EXPECT_DOUBLE_EQ(whole.generating - halved.generating, kExperts);
  EXPECT_DOUBLE_EQ(whole.caches, halved.caches);
  EXPECT_DOUBLE_EQ(memory({named}).generating, halved.generating);
  // Nothing is gathered on one rank.
  EXPECT_DOUBLE_EQ(memory({eight, "rollout.gather_weights=false"}).generating, halved.generating);
  // Caches take their share of what the experts leave.
  const auto caches = [&](std::vector<std::string> settings) {
    settings.insert(settings.end(),
                    {"rollout.max_sequences=100000", "rollout.memory_fraction=0.25"});
    return memory(std::move(settings), find_hardware("h200")).caches;
  };
  EXPECT_NEAR(caches({eight}) - caches({}), 0.25 * kExperts, 1);
  // A critic has adapters on such a model too. A frozen reference, which a policy that is trained
  // in part as a whole needs, has none: its experts are as they were loaded.
  const std::string critic = "rl.algorithm.advantage=gae";
  EXPECT_DOUBLE_EQ(memory({critic}).others - memory({critic, eight}).others, kExperts);
  const std::string saved = "adapter.modules_to_save=[lm_head]", kl = "rl.reference.kl_coef=0.1";
  EXPECT_GT(memory({kl, saved, named}).others, 2 * kExperts);
  EXPECT_DOUBLE_EQ(memory({kl, saved, named}).others, memory({kl, saved}).others);
  EXPECT_DOUBLE_EQ(memory({critic, saved}).others - memory({critic, saved, eight}).others,
                   kExperts);
  EXPECT_DOUBLE_EQ(memory({critic, saved}).weights, memory({critic, saved, eight}).weights);
}

TEST(GenerationMemory, RanksGatherWhatTheyDivide) {
  const auto model = models::preset("qwen3.5-35b-a3b");
  const Step step = describe_step(policy_config({}), model);
  double dense = 0, experts = 0, dense_block = 0, expert_block = 0;
  for (const ParameterCount& count : step.parameters) {
    dense += count.dense(1);
    experts += count.experts;
    dense_block = std::max(dense_block, count.dense(1));
    expert_block = std::max(expert_block, count.experts);
  }
  const auto difference = [](std::vector<std::string> layout, std::int64_t ranks) {
    const auto generating = [&](const char* gathers) {
      std::vector<std::string> settings = layout;
      settings.emplace_back(gathers);
      return memory_of_run("qwen3.5-35b-a3b", settings, ranks).generating;
    };
    return generating("rollout.gather_weights=true") - generating("rollout.gather_weights=false");
  };
  // Embedding, head and two blocks are gathered in any case.
  const double rest = dense - 2 * dense_block, of_experts = experts - 2 * expert_block;
  EXPECT_NEAR(difference({"parallel.fsdp=4"}, 4), 2 * (rest + of_experts), 1e3);
  // Ranks along tp, dp or ep alone have their blocks whole all the time.
  EXPECT_EQ(difference({"parallel.dp=4"}, 4), 0);
  EXPECT_EQ(difference({"parallel.tp=2", "parallel.ep=2"}, 2), 0);
  EXPECT_NEAR(difference({"parallel.fsdp=4", "parallel.ep=4"}, 4), 2 * rest, 1e3);
}

TEST(GenerationMemory, AMergedAdapterTakesAsMuchAsTheMatricesItIsIn) {
  const auto copies = [](const char* preset, std::vector<std::string> settings,
                         std::int64_t ranks = 1) {
    settings.emplace_back("train.method=lora");
    const Memory beside = memory_of_run(preset, settings, ranks);
    settings.emplace_back("rollout.merge_adapter=true");
    const Memory merged = memory_of_run(preset, settings, ranks);
    EXPECT_DOUBLE_EQ(merged.generating - beside.generating, merged.merged);
    // They stay while the rank trains, without caches too.
    EXPECT_DOUBLE_EQ(merged.peak - beside.peak, merged.merged);
    return merged.merged;
  };
  // 24 layers of a matrix of 1024 x 3584, which ranks along tp divide.
  const std::string down = "adapter.targets=[down_proj]";
  EXPECT_EQ(copies("qwen3.5-0.8b", {down}), 2.0 * 24 * 1024 * 3584);
  EXPECT_EQ(copies("qwen3.5-0.8b", {down, "rollout.release_memory=true"}), 2.0 * 24 * 1024 * 3584);
  EXPECT_EQ(copies("qwen3.5-0.8b", {down, "parallel.tp=2"}, 2), 24.0 * 1024 * 3584);
  // Adapters on linear layers leave routed experts, norms and tables as they are.
  const double linears = copies("qwen3.5-35b-a3b", {});
  EXPECT_GT(linears, 1e9);
  EXPECT_LT(linears, 4e9);
  EXPECT_DOUBLE_EQ(
      copies("qwen3.5-35b-a3b", {"adapter.target_parameters=[experts.down_proj]"}) - linears,
      2.0 * 40 * 256 * 2048 * 512);
  // Ranks that only generate have them, too.
  const auto apart = [](const char* merges) {
    const auto config = policy_config(
        {"train.method=lora", "adapter.targets=[down_proj]", "rl.rollout_ranks=1", merges});
    return plan_layout(config, models::preset("qwen3.5-0.8b"), 1).rollout->weights;
  };
  EXPECT_DOUBLE_EQ(apart("rollout.merge_adapter=true") - apart("rollout.merge_adapter=false"),
                   2.0 * 24 * 1024 * 3584);
}

TEST(GenerationMemory, PinnedSetsOfAdaptersStayBesideTheModels) {
  const std::string experts = "adapter.target_parameters=[experts.down_proj]";
  // Of one set: A of [256, 16, 512] and B of [256, 2048, 16] in 40 layers, in bf16.
  const double one = 2 * 40.0 * 256 * 16 * (512 + 2048);
  const auto pinned = [&](std::vector<std::string> settings, std::int64_t ranks = 1) {
    settings.insert(settings.end(), {"train.method=lora", "rl.update_mode=pin"});
    const double linears = memory_of_run("qwen3.5-35b-a3b", settings, ranks).pinned;
    settings.push_back(experts);
    const Memory memory = memory_of_run("qwen3.5-35b-a3b", settings, ranks);
    settings.emplace_back("rl.update_mode=keep");
    const Memory kept = memory_of_run("qwen3.5-35b-a3b", settings, ranks);
    EXPECT_EQ(kept.pinned, 0);
    EXPECT_GE(memory.peak - kept.peak, memory.pinned - 1);
    EXPECT_GE(memory.generating - kept.generating, memory.pinned - 1);
    return memory.pinned - linears;
  };
  const std::string async = "rl.mode=async";
  // K + 2 versions, of which one may be written, and 16 at most; a run of so many steps has no
  // older ones.
  EXPECT_DOUBLE_EQ(pinned({}), 2 * one);
  EXPECT_DOUBLE_EQ(pinned({async, "rl.max_staleness=3"}), 5 * one);
  EXPECT_DOUBLE_EQ(pinned({async, "rl.max_staleness=100"}), 16 * one);
  EXPECT_DOUBLE_EQ(pinned({async, "rl.max_staleness=3", "train.max_steps=1"}), 3 * one);
  EXPECT_DOUBLE_EQ(pinned({async, "parallel.fsdp=4"}, 4), 3 * one / 4);
  // Replicas have all of them each.
  EXPECT_DOUBLE_EQ(pinned({async, "parallel.dp=2"}, 2), 3 * one);
  // Ranks that only generate have them instead of those that train.
  const auto apart = [&](const std::string& mode) {
    const auto config =
        policy_config({"train.method=lora", "rl.rollout_ranks=1", async, experts, mode});
    const LayoutReport report = plan_layout(config, models::preset("qwen3.5-35b-a3b"), 1);
    EXPECT_EQ(report.stages.at(0).memory.pinned, 0);
    return report.rollout->weights;
  };
  const double sets = apart("rl.update_mode=pin") - apart("rl.update_mode=keep");
  EXPECT_GT(sets, 3 * one);
  EXPECT_LT(sets, 3.5 * one);
}

/// The first matrix with an adapter, or factor beside it, that rank 0 of a run does not have whole
/// between passes; empty: none.
std::string divided_parameter(const config::RunConfig& config, const models::Config& model,
                              const comm::Mesh& mesh) {
  const assembly::ModelOnRanks placed = assembly::place(assembly::recipe_of_run(config, model),
                                                        assembly::context_of_shapes(config, mesh));
  std::string first;
  const auto look = [&](nn::Parameter& parameter) {
    if (first.empty() && !parameter.has_memory()) first = parameter.name();
  };
  const auto look_at = [&](auto& product) {
    if (placed.adapters->of(product) == nullptr) return;
    placed.adapters->visit_factors(product, look);
    look(product.weight());
  };
  placed.model->visit_linears([&](nn::Linear& linear) {
    if (placed.adapters->of(linear) != nullptr) look(linear.weight());
  });
  placed.model->visit_expert_weights(look_at);
  return first;
}

TEST(GenerationMemory, AMergedAdapterIsRefusedWhereARunRefusesIt) {
  const auto model = models::preset("small-moe");
  const std::string on_experts = "adapter.target_parameters=[experts.down_proj]",
                    shared = "adapter.shared_expert_factors=true", alone = "adapter.targets=[]";
  struct Layout {
    std::vector<std::string> settings;
    std::int64_t ranks;
    bool is_refused;
  };
  for (const Layout& layout : std::vector<Layout>{
           {{"parallel.dp=1"}, 1, false},
           {{"parallel.dp=2", on_experts}, 2, false},
           {{"parallel.tp=2"}, 2, false},
           {{"parallel.tp=2", "parallel.ep=1", on_experts}, 2, true},
           {{"parallel.tp=2", "parallel.ep=2", on_experts}, 2, false},
           {{"parallel.fsdp=2"}, 2, true},
           {{"parallel.fsdp=2", "parallel.ep=2", on_experts, alone}, 2, false},
           {{"parallel.fsdp=2", "parallel.ep=2", on_experts, alone, shared}, 2, true},
           {{"parallel.fsdp=2", "parallel.dp=2"}, 4, true}}) {
    std::vector<std::string> settings = layout.settings;
    settings.insert(settings.end(), {"train.method=lora", "rollout.merge_adapter=true"});
    const config::RunConfig config = policy_config(settings);
    const comm::Mesh mesh(assembly::mesh_sizes(config.parallel, layout.ranks), 0, layout.ranks,
                          config.parallel.ep);
    const std::string divided = divided_parameter(config, model, mesh);
    const std::string name = layout.settings.front() + ' ' + layout.settings.back();
    EXPECT_EQ(!divided.empty(), layout.is_refused) << name;
    const std::string expected = divided.empty()
                                     ? "(no error)"
                                     : "merge_adapter: this rank does not hold " + divided +
                                           " whole between passes; expected parallel.fsdp 1";
    const auto expect = [&](const char* by, const std::function<void()>& work) {
      EXPECT_EQ(testing::message_of(work).substr(0, expected.size()), expected)
          << by << ", " << name;
    };
    expect("plan", [&] { plan_layout(config, model, layout.ranks); });
    expect("dry run", [&] { dry_run(config, model, layout.ranks); });
    expect("search",
           [&] { search_layouts(config, model, layout.ranks, find_hardware("h200"), 1); });
  }
}

TEST(GenerationMemory, AMergedAdapterIsAskedOfTheRanksThatGenerate) {
  const auto model = models::preset("small-moe");
  const auto refusal = [&](std::vector<std::string> settings) {
    settings.insert(settings.end(), {"train.method=lora", "rollout.merge_adapter=true",
                                     "parallel.fsdp=2", "rl.rollout_ranks=2"});
    const config::RunConfig config = policy_config(settings);
    return testing::message_of([&] { plan_layout(config, model, 2); });
  };
  const std::string on_experts = "adapter.target_parameters=[experts.down_proj]";
  EXPECT_EQ(refusal({}), "(no error)");
  EXPECT_EQ(refusal({on_experts}), "(no error)");
  EXPECT_EQ(refusal({"rollout.tp=2"}), "(no error)");
  const std::string said = refusal({on_experts, "rollout.tp=2"});
  EXPECT_TRUE(said.starts_with("merge_adapter: this rank does not hold model.layers.")) << said;
  // Search keeps what a run accepts.
  const config::RunConfig free = policy_config(
      {"train.method=lora", "rollout.merge_adapter=true", "parallel.tp=1", "parallel.pp=1"});
  for (const Proposal& proposal : search_layouts(free, model, 4, find_hardware("h200"), 20).best) {
    EXPECT_EQ(std::ranges::count(proposal.settings, "parallel.fsdp=2"), 0);
    EXPECT_EQ(std::ranges::count(proposal.settings, "parallel.fsdp=4"), 0);
  }
}

}  // namespace
}  // namespace heddle::plan
