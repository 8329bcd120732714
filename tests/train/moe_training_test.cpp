#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "assembly/from_config.h"
#include "base/errors.h"
#include "ckpt/safetensors.h"
#include "train/auxiliary_loss.h"
#include "train/expert_load.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;

/// A small mixture of experts.
class MoeTraining : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    make_model("moe", {{"model_type", "qwen3_5_moe_text"},
                       {"num_experts", 6},
                       {"num_experts_per_tok", 2},
                       {"moe_intermediate_size", 24},
                       {"shared_expert_intermediate_size", 16}});
  }
  std::vector<std::string> moe(std::vector<std::string> more) const {
    more.insert(more.begin(), "model.path=" + (dir_ / "moe").string());
    return more;
  }
  std::vector<std::string> experts(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"train.method=lora", "adapter.rank=3", "optim.lr=1e-2",
                               "adapter.target_parameters=[mlp.experts.gate_up_proj, "
                               "mlp.experts.down_proj]"});
    return moe(std::move(more));
  }
  std::vector<double> logprobs(const std::string& model, const std::string& adapter) const {
    std::vector<std::string> command = {"score",     model,
                                        "--input",   (dir_ / "train.jsonl").string(),
                                        "--output",  (dir_ / "scored.jsonl").string(),
                                        "--threads", "1",
                                        "--dtype",   "float64"};
    if (!adapter.empty()) command.insert(command.end(), {"--adapter", adapter});
    EXPECT_EQ(run_cli(command), 0);
    std::vector<double> all;
    std::ifstream scored(dir_ / "scored.jsonl");
    for (std::string line; std::getline(scored, line);) {
      const nlohmann::json row = nlohmann::json::parse(line);
      for (const auto& value : row.at("logprobs")) {
        if (value.is_number()) all.push_back(value);
      }
    }
    return all;
  }
};

/// How many numbers a file holds, and how many of them are factors for all experts.
struct Numbers {
  std::int64_t all = 0, shared = 0;
};

Numbers stored(const std::filesystem::path& path) {
  const ckpt::SafetensorsFile file(path);
  Numbers numbers;
  for (const ckpt::StoredTensor& tensor : file.tensors()) {
    numbers.all += tensor.numel();
    if (tensor.shape.size() == 3 && tensor.shape[0] == 1) numbers.shared += tensor.numel();
  }
  return numbers;
}

class MoeAdapterTraining : public MoeTraining, public ::testing::WithParamInterface<bool> {};

INSTANTIATE_TEST_SUITE_P(Factors, MoeAdapterTraining, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Shared" : "Pairs"; });

TEST_P(MoeAdapterTraining, AdaptersOnExpertsLearnResumeAndMerge) {
  std::vector<double> losses;
  const auto only_experts =
      experts({"adapter.targets=[]",
               std::string("adapter.shared_expert_factors=") + (GetParam() ? "true" : "false")});
  train_until(config("whole", only_experts), 1000, &losses);
  EXPECT_LT(losses.back(), losses.front());
  train_until(config("parts", only_experts), 5);
  train_until(config("parts", only_experts), 1000);
  EXPECT_EQ(weights("whole", "final/adapter_model.safetensors"),
            weights("parts", "final/adapter_model.safetensors"));
  // A checkpoint has a shared factor once, and PEFT's file one for each of 6 experts.
  const Numbers own = stored(dir_ / "whole/checkpoints/step-00000012/weights.safetensors"),
                peft = stored(dir_ / "whole/final/adapter_model.safetensors");
  EXPECT_EQ(own.shared > 0, GetParam());
  EXPECT_EQ(peft.all, own.all + 5 * own.shared);

  const std::string model = (dir_ / "moe").string(), adapter = (dir_ / "whole/final").string();
  ASSERT_EQ(run_cli({"export", model, "--adapter", adapter, "--output", (dir_ / "merged").string(),
                     "--dtype", "float64"}),
            0);
  const auto base = logprobs(model, ""), adapted = logprobs(model, adapter),
             merged = logprobs((dir_ / "merged").string(), "");
  ASSERT_FALSE(base.empty());
  double moved = 0;
  for (std::size_t i = 0; i < base.size(); ++i) {
    EXPECT_NEAR(adapted[i], merged[i], 1e-4);  // stored in float32
    moved = std::max(moved, std::abs(adapted[i] - base[i]));
  }
  EXPECT_GT(moved, 0.05);

  // An adapter alone is written as PEFT reads it, which it is here.
  const std::string copy = (dir_ / "copy").string();
  ASSERT_EQ(run_cli({"export", adapter, "--output", copy}), 0);
  for (const char* file : {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"})
    EXPECT_EQ(files::read(fs::path(copy) / file), files::read(fs::path(adapter) / file)) << file;
  EXPECT_EQ(run_cli({"export", adapter, "--output", copy}), 2);
  for (const std::vector<std::string>& option : {std::vector<std::string>{"--adapter", adapter},
                                                 {"--base", model},
                                                 {"--head", "lm"},
                                                 {"--gguf"}}) {
    std::vector<std::string> words = {"export", adapter, "--output", (dir_ / "refused").string()};
    words.insert(words.end(), option.begin(), option.end());
    EXPECT_EQ(run_cli(words), 2) << option[0];
  }
  EXPECT_FALSE(fs::exists(dir_ / "refused"));
}

TEST_F(MoeTraining, RecomputationGivesTheSameAdapters) {
  for (const char* recompute : {"off", "full"})
    train_until(config(recompute, experts({std::string("train.recompute=") + recompute})), 1000);
  EXPECT_EQ(weights("off", "final/adapter_model.safetensors"),
            weights("full", "final/adapter_model.safetensors"));
}

TEST_F(MoeTraining, WrongExpertTargetsAreNamed) {
  EXPECT_THAT(refusal_of({"train.method=lora", "adapter.target_parameters=[experts.gate_up_proj]"}),
              HasSubstr("this model has no routed experts"));
  EXPECT_THAT(refusal_of(moe({"train.method=lora", "adapter.target_parameters=[experts.up_proj]"})),
              HasSubstr("'experts.up_proj' matches no parameter"));
  EXPECT_THAT(refusal_of(experts({"adapter.dropout=0.1"})), HasSubstr("have no dropout"));
  EXPECT_THAT(refusal_of(moe({"train.method=lora", "adapter.shared_expert_factors=true"})),
              HasSubstr("is of adapters on experts; name those in adapter.target_parameters"));
}

TEST_F(MoeTraining, OneCoefficientForAllOfARun) {
  models::Config model;
  model.router_aux_loss_coef = 0.25;
  model.layers.resize(1);
  model.layers[0].moe = nn::MoeDims{8, 4, 2, 8, 8, true};
  config::RunConfig run;
  ASSERT_TRUE(model.is_moe());
  EXPECT_EQ(assembly::auxiliary_coefficient(run, model), 0);
  model.output_router_logits = true;
  EXPECT_EQ(assembly::auxiliary_coefficient(run, model), 0.25);
  run.train.router_aux_loss_coef = 0.5;
  EXPECT_EQ(assembly::auxiliary_coefficient(run, model), 0.5);
}

TEST(ExpertLoad, CountsRealTokensByLayer) {
  const at::Tensor experts = at::tensor({0, 2, 2, 1, 2, 0, 1, 1}, at::kLong).view({4, 2});
  const at::Tensor load =
      train::expert_load({{}, experts, experts}, 0, {false, true, true}, 4, 3, at::kCPU);
  ASSERT_EQ(load.sizes(), (std::vector<std::int64_t>{2, 4}));
  for (const std::int64_t layer : {0, 1}) {
    for (const auto& [expert, count] : {std::pair{0, 2}, {1, 1}, {2, 3}, {3, 0}})
      EXPECT_EQ(load[layer][expert].item<std::int64_t>(), count);
  }
  EXPECT_FALSE(train::expert_load({{}, {}}, 0, {false, false}, 4, 3, at::kCPU).defined());
  const train::LoadBalance balance =
      train::load_max_over_mean(at::tensor({1, 1, 1, 1, 0, 4, 0, 0}, at::kLong).view({2, 4}));
  EXPECT_EQ(balance.largest, 4);
  EXPECT_EQ(balance.mean, 2.5);
}

TEST_F(MoeTraining, PooledBalancingDiffersFromThatOfSequences) {
  std::vector<double> aux[2];
  for (const int pooled : {0, 1}) {
    std::atomic<bool> stop = false;
    struct Keep : train::Observer {
      void on_step(const train::StepInfo& info) override {
        aux->push_back(info.metrics.at("aux_loss"));
        const double load = info.metrics.at("moe_load_max_over_mean");
        EXPECT_GE(load, info.metrics.at("moe_load_max_over_mean_avg"));
        EXPECT_GT(load, 1);
        EXPECT_LE(load, 3);  // E / k
      }
      std::vector<double>* aux;
    } keep;
    keep.aux = &aux[pooled];
    train::Trainer trainer(
        config(pooled ? "hf" : "sequence",
               moe({"train.router_aux_loss_coef=0.5", "train.micro_batch_tokens=4096",
                    pooled ? "train.router_aux_loss=hf" : "train.router_aux_loss=sequence"})),
        keep, stop);
    trainer.run();
  }
  // Balanced experts give k = 2; pooling smooths, so that it is nearer.
  for (std::size_t i = 0; i < aux[0].size(); ++i) {
    EXPECT_GT(aux[0][i], aux[1][i]);
    EXPECT_GT(aux[1][i], 1.95);
  }
}

}  // namespace
}  // namespace heddle
