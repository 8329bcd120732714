#include <gtest/gtest.h>

#include "assembly/from_config.h"
#include "assembly/frozen_experts.h"
#include "base/errors.h"
#include "config/config.h"
#include "models/flops.h"
#include "models/registry.h"
#include "plan/dry_run.h"
#include "plan/layout_report.h"
#include "plan/measured.h"
#include "plan/search.h"
#include "testing/message_of.h"
#include "testing/paths.h"

namespace heddle::plan {
namespace {

config::RunConfig run_config(std::vector<std::string> settings) {
  settings.insert(settings.begin(), {"model.dtype=bfloat16", "data.max_length=4096",
                                     "train.micro_batch_tokens=4096"});
  return config::parse("", "test", settings, config::Completeness::kPartial);
}

TEST(Work, CountsTheFlopsOfTheFormulaOfEveryMfu) {
  for (const char* preset : {"qwen3.5-4b", "qwen3.5-35b-a3b", "qwen3-4b", "qwen3-30b-a3b"}) {
    const auto model = models::preset(preset);
    double flops = 6.0 * static_cast<double>(model.vocab_size * model.hidden_size);
    for (const models::LayerShape& layer : model.layers) {
      const LayerWork work = layer_work(layer);
      flops += 6 * (work.products + work.experts) + 4096 * work.attention + work.delta_rule;
    }
    EXPECT_DOUBLE_EQ(flops, models::training_flops_per_token(model, 4096)) << preset;
  }
}

// Rates are those of one GPU and one link; what is asserted is what counting makes of them.
TEST(Planner, PredictsTheMeasuredRunsWithin15Percent) {
  const auto runs = compare_with_measured(testing::source_path("bench/plan/measured.yaml"));
  ASSERT_GE(runs.size(), 15u);
  for (const Comparison& run : runs) {
    EXPECT_LT(std::abs(run.time_error()), 0.15) << run.name;
    EXPECT_LT(std::abs(run.memory_error()), 0.15) << run.name;
  }
}

TEST(Planner, MoreRanksShortenAStepAndNeverPerfectly) {
  const Hardware hardware = find_hardware("h200");
  const auto model = models::preset("qwen3.5-4b");
  const auto seconds = [&](std::int64_t ranks, const std::string& layout) {
    const auto config = run_config({"train.global_batch_size=64", layout});
    return plan_layout(config, model, ranks, hardware).time->total;
  };
  const double one = seconds(1, "parallel.dp=1");
  for (const char* dim : {"dp", "fsdp", "tp", "cp", "pp"}) {
    const double four = seconds(4, std::string("parallel.") + dim + "=4");
    EXPECT_LT(four, one) << dim;
    EXPECT_GT(four, one / 4) << dim;
  }
}

TEST(Planner, OffloadingTakesMemoryAndCostsTime) {
  const Hardware hardware = find_hardware("h200");
  const auto model = models::preset("qwen3.5-4b");
  const auto plan = [&](std::vector<std::string> settings) {
    settings.insert(settings.end(), {"train.global_batch_size=8", "train.recompute=full",
                                     "train.micro_batch_tokens=32768"});
    return plan_layout(run_config(settings), model, 1, hardware);
  };
  const LayoutReport kept = plan({}), state = plan({"optim.offload=true"}),
                     inputs = plan({"train.offload_activations=true"});
  EXPECT_LT(state.peak_bytes(), kept.peak_bytes() - 12 * 3.5e9);
  EXPECT_GT(state.time->total, kept.time->total + 0.5);
  // 29 of 32 inputs of 32,768 tokens.
  const auto activations = [](const LayoutReport& report) {
    return report.stages.at(0).memory.activations;
  };
  EXPECT_NEAR(activations(kept) - activations(inputs), 29.0 * 32768 * 2560 * 2, 1e6);
}

TEST(Planner, RecomputedElementwiseWorkRepeatsNoCommunicationAlongTp) {
  const auto model = models::preset("qwen3.5-4b");
  const auto plan = [&](const std::string& recompute) {
    return plan_layout(run_config({"train.global_batch_size=1", "parallel.tp=2", recompute}), model,
                       2);
  };
  const auto received = [](const LayoutReport& report) {
    double bytes = 0;
    for (const Traffic& row : report.traffic) bytes += row.bytes;
    return bytes;
  };
  const LayoutReport off = plan("train.recompute=off"),
                     elementwise = plan("train.recompute=elementwise"),
                     full = plan("train.recompute=full");
  EXPECT_EQ(received(elementwise), received(off));
  EXPECT_GT(received(full), received(off));
  // The rows that mixer and MLP read, in each of 32 layers.
  EXPECT_GT(elementwise.stages.at(0).memory.activations, 2.0 * 32 * 4096 * 2560 * 2);
  EXPECT_LT(elementwise.stages.at(0).memory.activations, off.stages.at(0).memory.activations);
}

// Every rank along cp has those of all tokens while a layer attends: 8192 x 2 x 4 heads x 256.
TEST(Planner, CountsTheGatheredKeysAndValues) {
  const auto keys = [](std::vector<std::string> settings) {
    settings.insert(settings.end(), {"data.max_length=8192", "train.micro_batch_tokens=8192"});
    return plan_layout(run_config(settings), models::preset("qwen3.5-4b"), 4).gathered_keys;
  };
  constexpr double kWhole = 8192.0 * 2 * 4 * 256 * 2;
  EXPECT_EQ(keys({"parallel.cp=4"}), kWhole);
  EXPECT_EQ(keys({"parallel.cp=2", "parallel.tp=2"}), kWhole / 2);
  EXPECT_EQ(keys({"parallel.cp=4", "parallel.cp_method=ulysses"}), 0);
  EXPECT_EQ(keys({"parallel.tp=4"}), 0);
}

TEST(Planner, FrozenExpertsInEightBitsTakeHalfOfTheirMemory) {
  const auto model = models::preset("qwen3.5-35b-a3b");
  const auto memory = [&](std::vector<std::string> settings, std::int64_t ranks = 1) {
    settings.insert(settings.end(),
                    {"train.micro_batch_tokens=8192", "train.recompute=elementwise"});
    return plan_layout(run_config(settings), model, ranks, find_hardware("h200"))
        .stages.at(0)
        .memory;
  };
  const std::string lora = "train.method=lora";
  const Memory whole = memory({lora}), halved = memory({lora, "kernels.fp8=true"});
  // 40 layers of 256 experts of three matrices of 2048 x 512.
  EXPECT_DOUBLE_EQ(whole.weights - halved.weights, 40.0 * 256 * 3 * 2048 * 512);
  EXPECT_DOUBLE_EQ(memory({lora, "kernels.frozen_experts=cuda.fp8"}).peak, halved.peak);
  // All weights in bf16 are there once.
  EXPECT_LT(halved.peak, whole.peak);
  EXPECT_GE(halved.peak, 2 * 34.6e9);

  const std::string eight = "kernels.fp8=true";
  EXPECT_EQ(memory({lora, eight, "kernels.frozen_experts=as_loaded"}).peak, whole.peak);
  const std::string saved = "adapter.modules_to_save=[lm_head]";
  for (const std::string& other : {std::string("adapter.target_parameters=[experts.down_proj]"),
                                   saved, std::string("kernels.moe_experts=reference")})
    EXPECT_EQ(memory({lora, eight, other}).weights, memory({lora, other}).weights) << other;
  // The key by its name is for those experts too that are frozen beside what is trained whole.
  EXPECT_DOUBLE_EQ(memory({lora, "kernels.frozen_experts=cuda.fp8", saved}).weights,
                   memory({lora, saved}).weights - 40.0 * 256 * 3 * 2048 * 512);
  const std::string wide = "model.dtype=float32";
  EXPECT_EQ(memory({lora, eight, wide}).weights, memory({lora, wide}).weights);
  EXPECT_EQ(memory({eight}).weights, memory({}).weights);
  // A trainer with a rollout in its job is one of two ranks.
  const std::vector<std::string> apart = {lora, "train.objective=policy",
                                          "rl.reward.verifiers.exact=1", "rl.rollout_ranks=1"};
  std::vector<std::string> eight_apart = apart;
  eight_apart.push_back(eight);
  EXPECT_EQ(memory(eight_apart).weights, memory(apart).weights);
  EXPECT_EQ(memory({lora, eight, "parallel.fsdp=2"}, 2).weights,
            memory({lora, "parallel.fsdp=2"}, 2).weights);
  EXPECT_DOUBLE_EQ(memory({lora, eight, "parallel.dp=2"}, 2).weights,
                   memory({lora, "parallel.dp=2"}, 2).weights - 40.0 * 256 * 3 * 2048 * 512);
  EXPECT_LT(memory({lora, eight, "parallel.pp=2"}, 2).weights,
            memory({lora, "parallel.pp=2"}, 2).weights - 18.0 * 256 * 3 * 2048 * 512);
}

/// What a start of the run would say; "(no error)" where the experts would do.
std::string refusal_at_start(const config::RunConfig& config, const models::Config& model,
                             std::int64_t ranks, bool is_job_of_several_ranks) {
  return testing::message_of([&] {
    assembly::require_frozen_experts(
        assembly::recipe_of_run(config, model), assembly::context_of_shapes(config).dtype,
        comm::Mesh(assembly::mesh_sizes(config.parallel, ranks), 0, ranks),
        is_job_of_several_ranks);
  });
}

TEST(Planner, RefusesTheFormOfExpertsThatARunRefuses) {
  const auto model = models::preset("small-moe");
  struct Refused {
    std::vector<std::string> settings;
    std::int64_t ranks = 1;
    bool is_job_of_several = false;
  };
  for (const Refused& refused : std::vector<Refused>{
           {{"train.method=full"}},
           {{"model.dtype=float32"}},
           {{"parallel.fsdp=2"}, 2, true},
           {{"adapter.target_parameters=[experts.down_proj]"}},
           {{"adapter.modules_to_save=[mlp]"}},
           {{"kernels.moe_experts=reference"}},
           {{"kernels.frozen_experts=cuda.fp9"}},
           {{"train.objective=policy", "rl.reward.verifiers.exact=1", "rl.rollout_ranks=1"},
            1,
            true}}) {
    std::vector<std::string> settings = {"train.method=lora", "kernels.frozen_experts=cuda.fp8",
                                         "train.global_batch_size=8"};
    settings.insert(settings.end(), refused.settings.begin(), refused.settings.end());
    const config::RunConfig config = run_config(settings);
    const std::string said =
        refusal_at_start(config, model, refused.ranks, refused.is_job_of_several);
    EXPECT_TRUE(said.starts_with("kernels.frozen_experts: ")) << said;
    const auto expect_refusal = [&](const char* by, const std::function<void()>& work) {
      EXPECT_EQ(testing::message_of(work), said) << by << ", " << settings.back();
    };
    expect_refusal("plan", [&] { plan_layout(config, model, refused.ranks); });
    expect_refusal("dry run", [&] { dry_run(config, model, refused.ranks); });
    expect_refusal("search",
                   [&] { search_layouts(config, model, refused.ranks, find_hardware("h200"), 1); });
  }
}

// By the rates that the hardware has for them, which are set to what halves a product's time.
TEST(Planner, ProductsOfEightBitFloatsTakeLessTime) {
  Hardware hardware = find_hardware("h200");
  hardware.eight_bit_products = hardware.eight_bit_experts = 2;
  const auto products = [&](const char* preset, std::vector<std::string> settings) {
    settings.insert(settings.end(), {"train.recompute=off", "train.global_batch_size=1"});
    return plan_layout(run_config(settings), models::preset(preset), 1, hardware).time->products;
  };
  const double rate = hardware.peak_tflops * 1e12 * hardware.products;
  const auto model = models::preset("qwen3.5-4b");
  // A product of each token with all weights of linear layers, all and in the first four of them.
  double all = 0, first_four = 0;
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    const double flops = 2 * 4096 * layer_work(model.layers[i]).products;
    all += flops;
    if (i < 4) first_four += flops;
  }
  const std::string lora = "train.method=lora", eight = "kernels.fp8=true",
                    every = "kernels.linear=cuda.fp8_rowwise_or_bf16";
  for (const std::string& method : {lora, std::string("train.method=full")}) {
    const double in_bf16 = products("qwen3.5-4b", {method});
    // Outputs and input gradients; weights' gradients and the head stay.
    EXPECT_NEAR(in_bf16 - products("qwen3.5-4b", {method, every}), all / rate, 1e-9) << method;
    EXPECT_NEAR(in_bf16 - products("qwen3.5-4b", {method, eight}), (all - first_four / 2) / rate,
                1e-9)
        << method;
  }
  const auto experts = models::preset("qwen3.5-35b-a3b");
  double of_experts = 0;
  for (const models::LayerShape& layer : experts.layers)
    of_experts += 2 * 4096 * layer_work(layer).experts;
  EXPECT_NEAR(products("qwen3.5-35b-a3b", {lora}) -
                  products("qwen3.5-35b-a3b", {lora, "kernels.frozen_experts=cuda.fp8"}),
              of_experts / (hardware.peak_tflops * 1e12 * hardware.expert_products), 1e-9);
}

TEST(Planner, TheNetworkIsSlowerThanTheHost) {
  const auto model = models::preset("qwen3.5-4b");
  const auto config = run_config({"train.global_batch_size=8", "parallel.tp=4"});
  Hardware hardware = find_hardware("h200");
  const double inside = plan_layout(config, model, 4, hardware).time->total;
  hardware.gpus_per_host = 2;
  EXPECT_GT(plan_layout(config, model, 4, hardware).time->total, 1.2 * inside);
}

config::RunConfig policy_config(std::vector<std::string> settings) {
  settings.insert(settings.begin(),
                  {"train.objective=policy", "rl.reward.verifiers.exact=1", "rl.groups_per_step=16",
                   "rl.samples_per_group=8", "train.recompute=full", "rollout.max_sequences=64"});
  return run_config(settings);
}

TEST(Policy, AStepHasTheCompletionsOfItsGroups) {
  const auto model = models::preset("qwen3.5-0.8b");
  const auto plan = [&](std::vector<std::string> settings) {
    return plan_layout(policy_config(std::move(settings)), model, 1, find_hardware("h200"));
  };
  const LayoutReport usual = plan({});
  EXPECT_EQ(usual.tokens_per_step, 16 * 8 * 4096);
  EXPECT_EQ(plan({"train.global_batch_size=3"}).tokens_per_step, usual.tokens_per_step);
  EXPECT_EQ(plan({"rl.samples_per_group=4"}).tokens_per_step, usual.tokens_per_step / 2);
  const auto rows = plan_layout(run_config({"train.global_batch_size=128", "train.recompute=full"}),
                                model, 1, find_hardware("h200"));
  EXPECT_DOUBLE_EQ(usual.time->total, rows.time->total);
}

TEST(Policy, RanksThatTrainAndGenerateHoldCachesToo) {
  const auto model = models::preset("qwen3.5-0.8b");
  const auto plan = [&](std::vector<std::string> settings, std::int64_t ranks = 1) {
    return plan_layout(policy_config(std::move(settings)), model, ranks);
  };
  // 6 attention layers of 2 heads, 18 of Gated DeltaNet with 16 heads of 128 x 128; 64 sequences
  // and 4 kept states, one slot and one page that fill passes up.
  const double pages = 6.0 * (64 * 128 + 1) * 32 * 2 * 2 * 256 * 2;
  const double slots = 18.0 * (64 + 4 + 1) * (16 * 128 * 128 * 4 + 6144 * 3 * 2);
  const LayoutReport usual = plan({});
  const Memory& memory = usual.stages.at(0).memory;
  EXPECT_DOUBLE_EQ(memory.caches, pages + slots);
  const LayoutReport released = plan({"rollout.release_memory=true"});
  EXPECT_NEAR(usual.peak_bytes() - released.peak_bytes(), memory.caches, 1);
  EXPECT_GE(released.peak_bytes(), memory.caches);
  const double bf16 = plan({"rollout.state_dtype=bfloat16"}).stages.at(0).memory.caches;
  EXPECT_DOUBLE_EQ(memory.caches - bf16, 18.0 * 69 * 16 * 128 * 128 * 2);
}

TEST(Policy, CachesTakeTheirShareOfADeviceAtMost) {
  const auto model = models::preset("qwen3.5-0.8b");
  const auto caches = [&](const char* fraction) {
    const auto config = policy_config({"rollout.max_sequences=100000", fraction});
    return plan_layout(config, model, 1, find_hardware("h200")).stages.at(0).memory.caches;
  };
  const double half = caches("rollout.memory_fraction=0.5");
  EXPECT_DOUBLE_EQ(caches("rollout.memory_fraction=0"), half);
  EXPECT_NEAR(caches("rollout.memory_fraction=0.25"), half / 2, 1);
  EXPECT_LT(half, 0.5 * find_hardware("h200").memory_gib * (1u << 30));
}

TEST(Policy, RanksThatOnlyGenerateHaveAMemoryOfTheirOwn) {
  const auto model = models::preset("qwen3.5-0.8b");
  const LayoutReport here = plan_layout(policy_config({}), model, 1),
                     apart = plan_layout(policy_config({"rl.rollout_ranks=1"}), model, 1);
  EXPECT_FALSE(here.rollout);
  ASSERT_TRUE(apart.rollout);
  EXPECT_EQ(apart.stages.at(0).memory.caches, 0);
  EXPECT_DOUBLE_EQ(apart.rollout->caches, here.stages.at(0).memory.caches);
  EXPECT_NEAR(apart.rollout->weights, 2.0 * 0.75e9, 0.1e9);
}

TEST(Policy, CriticAndReferenceTakeMemory) {
  const auto model = models::preset("qwen3.5-0.8b");
  const auto others = [&](std::vector<std::string> settings) {
    return plan_layout(policy_config(std::move(settings)), model, 1).stages.at(0).memory.others;
  };
  EXPECT_EQ(others({}), 0);
  const double reference = others({"rl.reference.kl_coef=0.1"});
  EXPECT_NEAR(reference, 2.0 * 0.75e9, 0.1e9);
  EXPECT_EQ(others({"rl.reference.kl_coef=0.1", "train.method=lora"}), 0);
  EXPECT_GT(others({"rl.algorithm.advantage=gae"}), 5 * reference);
}

TEST(Search, DividesTheCompletionsOfAStep) {
  const auto model = models::preset("qwen3.5-0.8b");
  const auto config =
      policy_config({"rl.groups_per_step=1", "rl.samples_per_group=4", "train.global_batch_size=64",
                     "parallel.tp=1", "parallel.pp=1", "parallel.cp=1"});
  EXPECT_FALSE(search_layouts(config, model, 4, find_hardware("h200"), 1).best.empty());
  try {
    search_layouts(config, model, 8, find_hardware("h200"), 1);
    ADD_FAILURE() << "8 data ranks have 4 completions";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what())
                  .find("raise rl.groups_per_step x rl.samples_per_group (4 rows now)"),
              std::string::npos)
        << error.what();
  }
}

TEST(Search, ProposesLayoutsThatFitAndThatARunAccepts) {
  const auto config = run_config({"train.global_batch_size=256"});
  const auto model = models::preset("qwen3.5-27b");
  const Hardware hardware = find_hardware("h100");
  const Search search = search_layouts(config, model, 64, hardware, 5);
  ASSERT_EQ(search.best.size(), 5u);
  double last = 0;
  for (const Proposal& proposal : search.best) {
    EXPECT_LE(proposal.peak_bytes, hardware.memory_gib * (1u << 30));
    EXPECT_GE(proposal.time.total, last);
    last = proposal.time.total;
    std::vector<std::string> settings = {"train.global_batch_size=256"};
    settings.insert(settings.end(), proposal.settings.begin(), proposal.settings.end());
    const LayoutReport report = plan_layout(run_config(settings), model, 64, hardware);
    EXPECT_DOUBLE_EQ(report.time->total, proposal.time.total);
  }
}

TEST(Search, KeepsWhatIsSet) {
  const auto config = run_config(
      {"train.global_batch_size=64", "parallel.tp=8", "parallel.dp=2", "train.recompute=full"});
  const auto model = models::preset("qwen3.5-27b");
  const Search search = search_layouts(config, model, 32, find_hardware("h200"), 4);
  ASSERT_FALSE(search.best.empty());
  for (const Proposal& proposal : search.best) {
    const auto& settings = proposal.settings;
    for (const char* kept : {"parallel.tp=8", "parallel.dp=2", "train.recompute=full"})
      EXPECT_EQ(std::count(settings.begin(), settings.end(), kept), 1) << kept;
    EXPECT_GT(proposal.mfu, 0.05);
    EXPECT_LT(proposal.mfu, 1);
  }
  try {
    search_layouts(config, model, 12, find_hardware("h200"), 4);
    ADD_FAILURE() << "8 does not divide 12";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("parallel.tp"), std::string::npos) << error.what();
  }
}

TEST(Search, NamesWhatElseWouldFit) {
  const auto config = run_config({"train.global_batch_size=8"});
  const auto model = models::preset("qwen3.5-27b");
  const Search search = search_layouts(config, model, 4, find_hardware("h100"), 3);
  EXPECT_TRUE(search.best.empty());
  ASSERT_FALSE(search.otherwise.empty());
  for (const Proposal& proposal : search.otherwise) {
    EXPECT_LE(proposal.peak_bytes, find_hardware("h100").memory_gib * (1u << 30));
    std::vector<std::string> settings = {"train.global_batch_size=8"};
    settings.insert(settings.end(), proposal.settings.begin(), proposal.settings.end());
    EXPECT_DOUBLE_EQ(plan_layout(run_config(settings), model, 4, find_hardware("h100")).time->total,
                     proposal.time.total);
  }
}

TEST(Search, SaysWhatLacksLeastWhereNothingFits) {
  const auto config = run_config({"train.global_batch_size=8"});
  const Search search =
      search_layouts(config, models::preset("qwen3.5-397b-a17b"), 8, find_hardware("h100"), 3);
  EXPECT_TRUE(search.best.empty());
  ASSERT_EQ(search.smallest.size(), 1u);
  EXPECT_GT(search.smallest[0].peak_bytes, find_hardware("h100").memory_gib * (1u << 30));
}

}  // namespace
}  // namespace heddle::plan
