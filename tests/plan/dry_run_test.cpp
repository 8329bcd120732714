#include "plan/dry_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "config/config.h"
#include "models/registry.h"
#include "plan/layout_report.h"

namespace heddle::plan {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

config::RunConfig run_config(std::vector<std::string> settings) {
  settings.insert(settings.begin(),
                  {"model.dtype=bfloat16", "data.max_length=4096", "train.global_batch_size=64"});
  return config::parse("", "test", settings, config::Completeness::kPartial);
}

models::Config small(bool moe) { return models::preset(moe ? "small-moe" : "small-10m"); }

TEST(DryRun, RunsAllOfEveryLayoutOnShapes) {
  for (const std::vector<std::string>& layout : std::vector<std::vector<std::string>>{
           {"parallel.dp=3"},
           {"parallel.tp=2", "parallel.fsdp=3", "parallel.dp=2"},
           {"parallel.tp=2", "parallel.pp=4"},
           {"parallel.cp=3", "parallel.fsdp=2", "train.recompute=elementwise"},
           {"parallel.cp=2", "parallel.cp_method=ulysses", "parallel.tp=2"},
           {"parallel.pp=2", "parallel.pp_schedule=interleaved", "parallel.dp=2"},
           {"parallel.fsdp=2", "train.method=lora"},
           {"parallel.dp=3", "train.method=lora"},
           {"parallel.dp=2", "parallel.fsdp=2", "train.method=lora"},
           {"parallel.dp=4", "parallel.ep=2", "train.method=lora"},
           {"parallel.tp=2", "parallel.dp=2", "train.method=lora"},
           {"parallel.fsdp=2", "kernels.fp8=true", "kernels.attention=cuda.cudnn"},
           {"parallel.fsdp=2", "model.head=classify", "model.num_labels=3"},
           {"parallel.tp=2", "model.head=embed"},
           {"parallel.dp=2", "parallel.ep=2"},
           {"parallel.tp=2", "parallel.cp=2", "parallel.fsdp=3", "parallel.ep=4"},
           {"parallel.tp=2", "parallel.pp=2", "train.router_aux_loss_coef=0.01"},
           {"parallel.cp=2", "parallel.ep=2", "train.router_aux_loss_coef=0.01",
            "train.router_aux_loss=hf"},
           {"parallel.fsdp=2", "parallel.ep=2", "train.method=lora",
            "adapter.target_parameters=[mlp.experts.gate_up_proj,mlp.experts.down_proj]"},
           {"parallel.fsdp=2", "parallel.ep=2", "train.method=lora",
            "adapter.target_parameters=[mlp.experts.gate_up_proj,mlp.experts.down_proj]",
            "adapter.shared_expert_factors=true"}}) {
    const auto config = run_config(layout);
    const auto& p = config.parallel;
    const auto model = small(p.ep > 1 || config.train.router_aux_loss_coef > 0);
    const std::int64_t world = p.tp * p.cp * p.pp * p.fsdp.value * p.dp.value;
    const DryRunReport report = dry_run(config, model, world);
    ASSERT_EQ(report.stages.size(), static_cast<std::size_t>(p.pp)) << layout[0];
    std::int64_t blocks = 0;
    for (const DryRank& rank : report.stages) {
      blocks += rank.blocks;
      EXPECT_EQ(rank.ran_embedding, rank.stage_rank == 0) << layout[0];
      EXPECT_EQ(rank.ran_head, rank.stage_rank + 1 == p.pp) << layout[0];
    }
    EXPECT_EQ(blocks, 2 * model.num_hidden_layers()) << layout[0];
  }
}

TEST(DryRun, OwnersOfExpertsCoverThemOnce) {
  const auto config = run_config(
      {"parallel.tp=2", "parallel.fsdp=2", "parallel.dp=2", "parallel.pp=2", "parallel.ep=4"});
  const DryRunReport report = dry_run(config, small(true), 16);
  double owned = 0;
  for (const DryRank& rank : report.stages) {
    owned += rank.owned;
  }
  EXPECT_GT(report.elements * 2, owned);
}

// That each parameter is owned once is what it checks itself.
TEST(DryRun, OfLargeModelsOnManyRanks) {
  struct Large {
    const char* preset;
    std::int64_t world;
    double elements;
    std::vector<std::string> layout;
  };
  for (const Large& large :
       {Large{"qwen3.5-27b", 64, 27e9, {"parallel.tp=4", "parallel.fsdp=16"}},
        Large{"qwen3-0.6b", 2, 0.596e9, {"parallel.tp=2"}},
        Large{"qwen3-1.7b", 2, 1.72e9, {"parallel.tp=2"}},
        Large{"qwen3-4b", 8, 4.02e9, {"parallel.tp=4", "parallel.pp=2"}},
        Large{"qwen3-8b", 8, 8.19e9, {"parallel.tp=2", "parallel.fsdp=4"}},
        Large{"qwen3-14b", 8, 14.8e9, {"parallel.tp=2", "parallel.fsdp=4"}},
        Large{"qwen3-32b", 16, 32.8e9, {"parallel.tp=4", "parallel.fsdp=4"}},
        Large{"qwen3-30b-a3b",
              16,
              30.5e9,
              {"parallel.tp=2", "parallel.fsdp=2", "parallel.pp=4", "parallel.ep=4"}},
        Large{"qwen3-235b-a22b",
              64,
              235e9,
              {"parallel.tp=4", "parallel.fsdp=8", "parallel.pp=2", "parallel.ep=32"}},
        Large{"qwen3.5-397b-a17b",
              1024,
              397e9,
              {"parallel.tp=2", "parallel.cp=2", "parallel.fsdp=2", "parallel.dp=8",
               "parallel.pp=16", "parallel.ep=16", "train.global_batch_size=1024"}}}) {
    const auto config = run_config(large.layout);
    const auto model = models::preset(large.preset);
    const DryRunReport report = dry_run(config, model, large.world);
    EXPECT_EQ(report.ranks, large.world);
    EXPECT_NEAR(report.elements / large.elements, 1, 0.05) << large.preset;
    ASSERT_EQ(report.stages.size(), static_cast<std::size_t>(config.parallel.pp));
    std::int64_t blocks = 0;
    for (const DryRank& rank : report.stages) {
      blocks += rank.blocks;
      EXPECT_GT(rank.owned, 0) << large.preset;
    }
    EXPECT_EQ(blocks, 2 * model.num_hidden_layers()) << large.preset;
  }
}

// The planner's counts from shapes equal what the objects of a rank hold.
TEST(DryRun, AgreesWithThePlannersMemory) {
  const auto model = models::preset("qwen3.5-4b");
  for (const std::vector<std::string>& layout :
       std::vector<std::vector<std::string>>{{"parallel.fsdp=8"},
                                             {"parallel.tp=2", "parallel.fsdp=4", "parallel.pp=2"},
                                             {"parallel.dp=8", "optim.state_dtype=bfloat16"}}) {
    const auto config = run_config(layout);
    const DryRunReport dry = dry_run(config, model, layout.size() == 3 ? 16 : 8);
    const LayoutReport plan = plan_layout(config, model, layout.size() == 3 ? 16 : 8);
    for (std::size_t i = 0; i < dry.stages.size(); ++i) {
      const DryRank& rank = dry.stages[i];
      const Memory& memory = plan.stages[i].memory;
      const double gathered =
          rank.gathered * (1 - 1.0 / static_cast<double>(config.parallel.fsdp.value));
      EXPECT_NEAR((rank.resident + gathered) / memory.weights, 1, 0.1) << layout[0];
      EXPECT_NEAR(rank.gradients / memory.gradients, 1, 0.02) << layout[0];
      EXPECT_NEAR(rank.optimizer / memory.optimizer, 1, 0.02) << layout[0];
    }
  }
}

TEST(DryRun, RefusesWhatAStartRefuses) {
  EXPECT_THAT([] { dry_run(run_config({"parallel.tp=3"}), small(false), 3); },
              ThrowsMessage<ConfigError>(HasSubstr("the nearest degree that does is")));
  EXPECT_THAT([] { dry_run(run_config({"parallel.pp=16"}), small(false), 16); },
              ThrowsMessage<ConfigError>(HasSubstr("and the model has 8")));
}

}  // namespace
}  // namespace heddle::plan
