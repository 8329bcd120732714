#include "train/parameter_groups.h"

#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "ckpt/model_directory.h"
#include "ckpt/tensor_io.h"
#include "ckpt/training_checkpoint.h"
#include "train/trainer_fixture.h"

namespace heddle::train {
namespace {

TEST(ParameterGroups, MuonTakesTheMatricesOfBlocks) {
  const auto is_muon = [](const char* name, std::vector<std::int64_t> shape) {
    return is_hidden_matrix(nn::Parameter(name, std::move(shape)));
  };
  EXPECT_TRUE(is_muon("model.layers.0.mlp.up_proj.weight", {48, 32}));
  EXPECT_TRUE(is_muon("model.layers.0.mlp.experts.down_proj", {4, 32, 16}));
  EXPECT_TRUE(is_muon("model.layers.0.mlp.gate.weight", {4, 32}));
  EXPECT_TRUE(is_muon("model.layers.0.mlp.up_proj.lora_A.weight", {4, 32}));
  EXPECT_FALSE(is_muon("model.embed_tokens.weight", {97, 32}));
  EXPECT_FALSE(is_muon("lm_head.weight", {97, 32}));
  EXPECT_FALSE(is_muon("score.weight", {3, 32}));
  EXPECT_FALSE(is_muon("model.norm.weight", {32}));
  EXPECT_FALSE(is_muon("model.layers.0.linear_attn.conv1d.weight", {128, 1, 4}));
  EXPECT_FALSE(is_muon("model.layers.0.mlp.shared_expert_gate.weight", {1, 32}));
}

/// Runs of one step of SGD, whose change of a weight is its learning rate times its gradient.
class RateTest : public TrainerTest {
 protected:
  void one_step(const std::string& run, std::vector<std::string> more) const {
    more.insert(more.begin(),
                {"train.max_steps=1", "optim.name=sgd", "optim.warmup_steps=0", "optim.clip_norm=0",
                 "optim.schedule=constant", "model.dtype=float64", "optim.lr=0.01"});
    train_until(config(run, more), 1000);
  }
  /// A weight after the step, unrounded.
  at::Tensor after(const std::string& run, const std::string& name) const {
    return ckpt::TrainingCheckpoint::open(dir_ / run / "checkpoints/step-00000001")
        .whole("weights/" + name);
  }
  /// How much more a weight moved in run `b` than in `a`.
  double ratio(const char* name, const std::string& a, const std::string& b,
               const std::string& model) const {
    const at::Tensor start =
        ckpt::read_tensor(ckpt::ModelDirectory::open(dir_ / model).at(name)).to(at::kDouble);
    const at::Tensor moved = after(a, name) - start;
    EXPECT_GT(moved.abs().max().item<double>(), 0) << name;
    return ((after(b, name) - start).norm() / moved.norm()).item<double>();
  }
};

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";
constexpr const char* kNorm = "model.norm.weight";

TEST_F(RateTest, HeadAndEmbeddingHaveTheirOwn) {
  make_model("untied", {{"tie_word_embeddings", false}});
  const std::string model = "model.path=" + (dir_ / "untied").string();
  one_step("plain", {model});
  one_step("groups", {model, "optim.lr_head=0.03", "optim.lr_embeddings=0.002"});
  EXPECT_NEAR(ratio(kHead, "plain", "groups", "untied"), 3, 1e-6);
  EXPECT_NEAR(ratio(kEmbedding, "plain", "groups", "untied"), 0.2, 1e-6);
  EXPECT_NEAR(ratio(kNorm, "plain", "groups", "untied"), 1, 1e-9);
}

TEST_F(RateTest, ATiedHeadHasThatOfTheEmbedding) {
  one_step("plain", {});
  one_step("groups", {"optim.lr_embeddings=0.05"});
  EXPECT_NEAR(ratio(kEmbedding, "plain", "groups", "model"), 5, 1e-6);
  EXPECT_THAT(refusal_of({"optim.lr_head=0.05"}),
              ::testing::AllOf(::testing::HasSubstr("optim.lr_head: "),
                               ::testing::HasSubstr("tied to the embedding")));
}

TEST_F(RateTest, AFactorWithoutItsParametersIsRefused) {
  EXPECT_THAT(refusal_of({"train.method=lora", "optim.lr_embeddings=1e-5"}),
              ::testing::HasSubstr("optim.lr_embeddings: this run does not train the embedding"));
  EXPECT_THAT(refusal_of({"optim.lr=0", "optim.lr_embeddings=1e-5"}),
              ::testing::HasSubstr("follows the schedule of optim.lr, which is 0"));
}

TEST_F(RateTest, LoraPlusTakesLargerStepsOfB) {
  const std::vector<std::string> lora = {"train.method=lora", "adapter.rank=4"};
  auto plus = lora;
  plus.push_back("adapter.loraplus_lr_ratio=16");
  one_step("plain", lora);
  one_step("plus", plus);
  for (const char* module : {"model.layers.0.mlp.up_proj", "model.layers.3.self_attn.q_proj"}) {
    const std::string a = std::string(module) + ".lora_A.weight",
                      b = std::string(module) + ".lora_B.weight";
    EXPECT_GT(after("plain", b).abs().max().item<double>(), 0) << module;
    EXPECT_TRUE(after("plus", b).allclose(16 * after("plain", b), 1e-9, 1e-12)) << module;
    // B begins with zeros, so that A has no gradient in the first step.
    EXPECT_TRUE(after("plus", a).equal(after("plain", a))) << module;
  }
}

TEST_F(RateTest, EqualRatesChangeNoBitAndOthersContinue) {
  train_until(config("plain"), 1000);
  train_until(config("same", {"optim.lr_embeddings=1e-3"}), 1000);
  EXPECT_EQ(weights("plain"), weights("same"));
  make_model("blocks", {{"hidden_size", 256}});
  for (const char* state : {"float32", "int8"}) {
    const std::string name = state;
    const std::vector<std::string> rates = {"model.path=" + (dir_ / "blocks").string(),
                                            "optim.lr_embeddings=1e-4",
                                            "optim.state_dtype=" + name};
    train_until(config("whole" + name, rates), 1000);
    train_until(config("parts" + name, rates), 5);
    train_until(config("parts" + name, rates), 1000);
    EXPECT_EQ(weights("whole" + name), weights("parts" + name)) << name;
  }
}

TEST_F(TrainerTest, MuonLearnsAndContinuesBitIdentically) {
  for (const char* dtype : {"float32", "bfloat16"}) {
    const std::string name = dtype;
    const std::vector<std::string> muon = {"optim.name=muon", "optim.weight_decay=0.1",
                                           "model.dtype=" + name};
    std::vector<double> whole, parts;
    train_until(config("whole" + name, muon), 1000, &whole);
    train_until(config("parts" + name, muon), 5, &parts);
    train_until(config("parts" + name, muon), 1000, &parts);
    EXPECT_EQ(whole, parts);
    EXPECT_EQ(weights("whole" + name), weights("parts" + name));
    EXPECT_LT(whole.back(), whole.front());
  }
}

TEST_F(TrainerTest, MuonRefusesStateThatItHasNot) {
  EXPECT_THAT(refusal_of({"optim.name=muon", "optim.state_dtype=int8"}),
              ::testing::HasSubstr("optim.name muon keeps its state in float32, found int8"));
  EXPECT_THAT(refusal_of({"optim.name=muon", "optim.offload=true"}),
              ::testing::HasSubstr("optim.offload: is for the state of AdamW"));
}

}  // namespace
}  // namespace heddle::train
