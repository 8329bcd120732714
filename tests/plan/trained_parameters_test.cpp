// Trained parameters and the head of a model: those of a start.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "config/config.h"
#include "models/registry.h"
#include "plan/dry_run.h"
#include "plan/layout_report.h"
#include "plan/policy_config.h"
#include "testing/message_of.h"

namespace heddle::plan {
namespace {

using Settings = std::vector<std::string>;

const std::string kLora = "train.method=lora";

config::RunConfig run_config(Settings settings) {
  settings.insert(settings.begin(),
                  {"model.dtype=bfloat16", "data.max_length=4096", "train.micro_batch_tokens=4096",
                   "train.global_batch_size=8", "train.recompute=full"});
  return config::parse("", "test", settings, config::Completeness::kPartial);
}

Settings joined(Settings settings, const Settings& more) {
  settings.insert(settings.end(), more.begin(), more.end());
  return settings;
}

models::Config model_of(const char* preset, bool is_tied) {
  models::Config model = models::preset(preset);
  model.tie_word_embeddings = is_tied;
  return model;
}

LayoutReport plan_of(const models::Config& model, const Settings& settings,
                     std::int64_t ranks = 1) {
  return plan_layout(run_config(settings), model, ranks, find_hardware("h200"));
}

Memory memory_of_run(const models::Config& model, const Settings& settings) {
  return plan_of(model, settings).stages.at(0).memory;
}

StepTime time_of_run(const models::Config& model, const Settings& settings) {
  return *plan_of(model, settings).time;
}

/// Compares what the objects of a start hold with the plan, of ranks that gather nothing.
void expect_agreement(const models::Config& model, const Settings& settings, std::int64_t ranks) {
  const config::RunConfig config = run_config(settings);
  const DryRunReport dry = dry_run(config, model, ranks);
  const LayoutReport plan = plan_layout(config, model, ranks);
  ASSERT_EQ(dry.stages.size(), plan.stages.size());
  for (std::size_t i = 0; i < dry.stages.size(); ++i) {
    const DryRank& made = dry.stages[i];
    const Memory& memory = plan.stages[i].memory;
    const std::string name = fmt::format("{} stage {}", fmt::join(settings, " "), i);
    EXPECT_NEAR(memory.gradients, made.gradients, 0.003 * made.gradients) << name;
    EXPECT_NEAR(memory.optimizer, made.optimizer, 0.003 * made.optimizer) << name;
    EXPECT_NEAR(memory.weights, made.resident, 0.003 * made.resident) << name;
  }
}

TEST(TrainedParameters, AreThoseOfAStart) {
  struct Case {
    Settings settings;
    bool is_tied = true;
  };
  for (const Case& run : std::vector<Case>{
           {{}},
           {{"train.freeze=['*.mlp.*']"}},
           {{"train.freeze=['*.experts.*', '*embed_tokens*']"}},
           {{"train.freeze=['*.layers.*']"}},
           {{"train.freeze=['lm_head.*']"}, false},
           {{"train.freeze=['*.layers.0.*', '*.layers.5.*', 'model.embed_tokens.weight']"}, false},
           {{kLora, "adapter.modules_to_save=[lm_head]"}, false},
           {{kLora, "adapter.modules_to_save=[embed_tokens]"}},
           {{kLora, "adapter.modules_to_save=[embed_tokens, lm_head]"}, false},
           {{kLora, "adapter.targets=[q_proj, o_proj]", "adapter.modules_to_save=[experts]"}},
           {{kLora, "adapter.targets=[q_proj, o_proj]",
             "adapter.modules_to_save=[experts, shared_expert, lm_head]",
             "train.freeze=['*.experts.*']"},
            false}}) {
    const auto model = model_of("small-moe", run.is_tied);
    expect_agreement(model, run.settings, 1);
    expect_agreement(model, joined(run.settings, {"parallel.dp=2"}), 2);
    expect_agreement(model, joined(run.settings, {"parallel.dp=2", "parallel.ep=2"}), 2);
    expect_agreement(model, joined(run.settings, {"parallel.pp=2"}), 2);
  }
  expect_agreement(models::preset("small-moe"),
                   {kLora, "adapter.targets=[q_proj, o_proj]", "adapter.modules_to_save=[mlp]"}, 1);
}

TEST(TrainedParameters, OfModelsWithOtherHeads) {
  for (const bool is_tied : {false, true}) {
    const auto model = model_of("small-10m", is_tied);
    for (const Settings& head : std::vector<Settings>{
             {"model.head=classify", "model.num_labels=300"},
             {"model.head=classify", "model.num_labels=1", "train.objective=reward"},
             {"model.head=classify", "model.num_labels=300", "train.freeze=[score.weight]"},
             {"model.head=embed"}}) {
      expect_agreement(model, head, 1);
      expect_agreement(model, joined(head, {kLora}), 1);
      expect_agreement(model, joined(head, {"parallel.dp=2"}), 2);
      expect_agreement(model, joined(head, {"parallel.pp=2"}), 2);
      expect_agreement(model, joined(head, {kLora, "parallel.pp=2"}), 2);
    }
  }
}

TEST(TrainedParameters, LayersBelowTheFirstTrainedOneKeepNothing) {
  const auto model = models::preset("qwen3.5-0.8b");
  const auto activations = [&](const Settings& settings) {
    return memory_of_run(model, settings).activations;
  };
  const double all = activations({});
  const std::string tables = "'*embed_tokens*'", first = "'*.layers.0.*', '*.layers.1.*'";
  // An input of 4096 x 1024 in each of 24 blocks.
  EXPECT_DOUBLE_EQ(all, 2.0 * 24 * 4096 * 1024);
  EXPECT_DOUBLE_EQ(activations({"train.freeze=[" + tables + ", " + first + "]"}), all * 22 / 24);
  EXPECT_DOUBLE_EQ(activations({"train.freeze=[" + first + "]"}), all);
  EXPECT_DOUBLE_EQ(activations({kLora, "adapter.targets=['*.layers.3.self_attn.*']"}),
                   all * 21 / 24);
  EXPECT_DOUBLE_EQ(activations({kLora, "adapter.targets=['*.layers.3.self_attn.*']",
                                "adapter.modules_to_save=[embed_tokens]"}),
                   all);
  const double whole = time_of_run(model, {"train.freeze=[" + tables + "]"}).products,
               upper =
                   time_of_run(model, {"train.freeze=[" + tables + ", '*.layers.?.*']"}).products;
  EXPECT_LT(upper, 0.8 * whole);
}

TEST(TrainedParameters, LayersBelowTheFirstTrainedOneGatherNothingForABackward) {
  const auto model = models::preset("qwen3.5-0.8b");
  const auto bytes = [&](const char* what, Settings settings) {
    settings.insert(settings.end(), {"parallel.fsdp=2", "parallel.tp=2"});
    double sum = 0;
    for (const Traffic& row : plan_of(model, settings, 4).traffic) {
      if (row.what == what) sum += row.bytes;
    }
    return sum;
  };
  const Settings upper = {"train.freeze=['*embed_tokens*', '*.layers.?.*']"};  // 14 of 24
  for (const char* what :
       {"weights gathered for the backward", "sums of gradients of hidden states"}) {
    EXPECT_GT(bytes(what, upper), 0) << what;
    EXPECT_NEAR(bytes(what, upper) / bytes(what, {}), 14.0 / 24, 1e-9) << what;
  }
  // Forward, backward and again: mixer and MLP gather two times each in a layer.
  EXPECT_NEAR(bytes("rows of hidden states", upper) / bytes("rows of hidden states", {}),
              (2 * 24 + 4 * 14) / (6.0 * 24), 1e-9);
  EXPECT_DOUBLE_EQ(bytes("weights gathered for the forward", upper),
                   bytes("weights gathered for the forward", {}));
}

// Gradients of few blocks come together and are whole until they are summed.
TEST(TrainedParameters, OneTrainedLayerHasItsWholeGradient) {
  const auto model = models::preset("qwen3.5-4b");
  const auto gradients = [&](const char* summing) {
    const Settings settings = {"parallel.fsdp=2", summing,
                               "train.freeze=['*embed_tokens*', '*.layers.?.*', '*.layers.1?.*', "
                               "'*.layers.2?.*', '*.layers.30.*']"};
    return plan_of(model, settings, 2).stages.at(0).memory.gradients;
  };
  EXPECT_GT(gradients("parallel.sum_gradients=step"), 4 * 50e6);
  EXPECT_DOUBLE_EQ(gradients("parallel.sum_gradients=micro_batch"),
                   gradients("parallel.sum_gradients=step"));
}

/// Seconds of products of `flops` on one H200.
double seconds_of(double flops) {
  const Hardware hardware = find_hardware("h200");
  return flops / (hardware.peak_tflops * 1e12 * hardware.products);
}

TEST(TrainedParameters, AreAllWeightsOfProductsWhereNothingIsFrozen) {
  for (const char* preset : {"qwen3.5-0.8b", "qwen3.5-35b-a3b", "small-moe"}) {
    const Step step = describe_step(run_config({}), models::preset(preset));
    for (const LayerWork& work : step.layers) {
      EXPECT_DOUBLE_EQ(work.trained_products, work.products) << preset;
      EXPECT_DOUBLE_EQ(work.trained_experts, work.experts) << preset;
    }
  }
}

TEST(TrainedParameters, HaveProductsForTheirGradients) {
  const auto model = models::preset("qwen3.5-0.8b");
  const auto products = [&](const Settings& settings) {
    return time_of_run(model, settings).products;
  };
  const double tokens = 8 * 4096, mlp = 24.0 * 3 * 1024 * 3584,
               head = as_double(model.vocab_size * model.hidden_size);
  EXPECT_NEAR(products({}) - products({"train.freeze=['*.mlp.*']"}), seconds_of(2 * tokens * mlp),
              1e-9);
  EXPECT_NEAR(products({}) - products({"train.freeze=['*embed_tokens*']"}),
              seconds_of(2 * tokens * head), 1e-9);
  const double adapters = products({kLora, "adapter.targets=['*.layers.0.linear_attn.out_proj']"});
  EXPECT_NEAR(products({kLora, "adapter.targets=['*.layers.0.linear_attn.out_proj']",
                        "adapter.modules_to_save=[mlp, embed_tokens]"}) -
                  adapters,
              seconds_of(2 * tokens * (mlp + head)), 1e-9);
  const auto experts = models::preset("qwen3.5-35b-a3b");
  const auto of_experts = [&](const Settings& settings) {
    return time_of_run(experts, settings).products;
  };
  // 8 of the experts in each of 40 layers.
  const Hardware hardware = find_hardware("h200");
  EXPECT_NEAR(of_experts({}) - of_experts({"train.freeze=['*.experts.*']"}),
              2 * tokens * 40 * 8 * 3 * 2048 * 512 /
                  (hardware.peak_tflops * 1e12 * hardware.expert_products),
              1e-9);
}

TEST(TrainedParameters, AHeadThatIsTrainedBesideAdaptersHasItsGradientAtThePeak) {
  const auto model = model_of("qwen3.5-9b", /*is_tied=*/false);
  const double table = as_double(model.vocab_size * model.hidden_size);
  const Memory adapters = memory_of_run(model, {kLora}),
               with_head = memory_of_run(model, {kLora, "adapter.modules_to_save=[lm_head]"});
  EXPECT_DOUBLE_EQ(with_head.weights, adapters.weights);
  EXPECT_DOUBLE_EQ(with_head.gradients - adapters.gradients, 4 * table);
  EXPECT_DOUBLE_EQ(with_head.optimizer - adapters.optimizer, 12 * table);
  EXPECT_GE(with_head.peak - adapters.peak, 16 * table);
}

TEST(TrainedParameters, ModelsWithOtherHeadsMakeNoLogits) {
  const auto model = models::preset("qwen3.5-0.8b");
  const double tokens = 8 * 4096, table = as_double(model.vocab_size * model.hidden_size);
  for (const Settings& head :
       std::vector<Settings>{{"model.head=classify", "model.num_labels=2"}, {"model.head=embed"}}) {
    // A tied table stays as an embedding.
    const Memory with_logits = memory_of_run(model, {}), without = memory_of_run(model, head);
    EXPECT_NEAR(without.gradients, with_logits.gradients, 4 * 2 * 1024);
    EXPECT_LT(without.working, 0.5 * with_logits.working) << head[0];
    EXPECT_LT(without.peak, with_logits.peak - 2 * 4096 * as_double(model.vocab_size) / 2);
    const StepTime step = time_of_run(model, {}), short_step = time_of_run(model, head);
    EXPECT_NEAR(step.products - short_step.products, seconds_of(6 * tokens * table), 1e-9);
    EXPECT_LT(short_step.elementwise, step.elementwise);
    // A pipeline's last stage works as its first.
    const LayoutReport halves = plan_of(model, joined(head, {"parallel.pp=2"}), 2);
    EXPECT_DOUBLE_EQ(halves.stages.at(1).memory.working, halves.stages.at(0).memory.working);
  }
}

TEST(TrainedParameters, OfACriticAreNotThoseOfThePolicy) {
  const auto others = [](const char* preset, Settings settings) {
    settings.emplace_back("rl.algorithm.advantage=gae");
    return plan_layout(policy_config(std::move(settings)), models::preset(preset), 1)
        .stages.at(0)
        .memory.others;
  };
  EXPECT_DOUBLE_EQ(others("qwen3.5-0.8b", {"train.freeze=['*.mlp.*', '*embed_tokens*']"}),
                   others("qwen3.5-0.8b", {}));
  EXPECT_DOUBLE_EQ(others("qwen3.5-9b", {kLora, "adapter.modules_to_save=[lm_head]"}),
                   others("qwen3.5-9b", {kLora}));
}

TEST(TrainedParameters, AreRefusedAsAtAStart) {
  const auto model = models::preset("small-10m");
  for (const Settings& settings : std::vector<Settings>{
           {"train.freeze=['*.nothing']"},
           {"train.freeze=['*']"},
           {kLora, "adapter.modules_to_save=[lm_heed]"},
           {kLora, "adapter.targets=[q_proj]", "adapter.modules_to_save=[q_proj]"}}) {
    const config::RunConfig config = run_config(settings);
    const std::string said = testing::message_of([&] { dry_run(config, model, 1); });
    EXPECT_NE(said, "(no error)") << settings.back();
    EXPECT_EQ(testing::message_of([&] { plan_layout(config, model, 1); }), said);
  }
}

// The text model of a checkpoint with images is model.language_model, which a plan cannot see.
TEST(TrainedParameters, AreNamedAsACheckpointDoes) {
  const auto model = models::preset("small-10m");
  const std::string nested = "train.freeze=[model.language_model.embed_tokens.weight]",
                    plain = "train.freeze=[model.embed_tokens.weight]";
  EXPECT_EQ(memory_of_run(model, {nested}).optimizer, memory_of_run(model, {plain}).optimizer);
  EXPECT_EQ(dry_run(run_config({nested}), model, 1).stages.at(0).optimizer,
            dry_run(run_config({plain}), model, 1).stages.at(0).optimizer);
  // Adapters go by the same names.
  for (const auto& [of_checkpoint, of_text] : std::vector<std::pair<std::string, std::string>>{
           {"adapter.targets=['model.language_model.layers.3.*']",
            "adapter.targets=['model.layers.3.*']"},
           {"adapter.modules_to_save=[model.language_model.embed_tokens]",
            "adapter.modules_to_save=[embed_tokens]"}}) {
    EXPECT_EQ(memory_of_run(model, {kLora, of_checkpoint}).optimizer,
              memory_of_run(model, {kLora, of_text}).optimizer);
    EXPECT_NE(memory_of_run(model, {kLora, of_checkpoint}).optimizer,
              memory_of_run(model, {kLora}).optimizer);
  }
}

TEST(TrainedParameters, AdaptersOfExpertsTakeTimeOfTheirOwn) {
  const auto model = models::preset("qwen3.5-35b-a3b");
  const auto elementwise = [&](const Settings& settings) {
    return time_of_run(model, joined({kLora}, settings)).elementwise;
  };
  const Hardware hardware = find_hardware("h200");
  const auto seconds = [&](double elements) {
    return 2 * 8 * 4096 * 40 * elements / (hardware.memory_gbs * 1e9 * hardware.elementwise);
  };
  // Rows of 8 experts: with recomputation twice the input of A and four times the change, once
  // for both factors' gradients the rows, which are made again, and the change of their gradients.
  const auto twice = [](double forward, double backward) { return 2 * forward + backward; };
  const double gate_up = 8 * twice(2048 + 4 * 1024, 7 * 2048 + 2 * 1024),
               down = 8 * twice(512 + 4 * 2048, 6 * 512 + 2 * 2048);
  const std::string of_down = "adapter.target_parameters=[experts.down_proj]",
                    both = "adapter.target_parameters=[experts.gate_up_proj,experts.down_proj]";
  const double linears = elementwise({});
  EXPECT_NEAR(elementwise({of_down}) - linears, seconds(down), 1e-9);
  EXPECT_NEAR(elementwise({both}) - linears, seconds(gate_up + down), 1e-9);
  // A shared factor multiplies a token once.
  EXPECT_NEAR(elementwise({both, "adapter.shared_expert_factors=true"}) - linears,
              seconds(twice(2048, 3 * 2048) + 8 * twice(4 * 1024, 2 * 1024) +
                      8 * twice(512, 6 * 512) + twice(2 * 2048, 2 * 2048)),
              1e-9);
}

}  // namespace
}  // namespace heddle::plan
