// Models in 8-bit floats on a GPU: which of their parts stay in the model's type.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "assembly/from_config.h"
#include "assembly/frozen_experts.h"
#include "assembly/model_on_ranks.h"
#include "comm/ranks.h"
#include "models/gradients.h"
#include "models/registry.h"
#include "models/tiny_model.h"
#include "nn/linear.h"
#include "nn/low_rank.h"
#include "nn/pass.h"
#include "ops/moe/frozen_experts.h"
#include "testing/message_of.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;

const c10::Device kGpu(c10::DeviceType::CUDA, 0);

class GpuEightBitModel : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  }
};

at::Tensor matrix(std::int64_t rows, std::int64_t columns) {
  return at::randn({rows, columns}, at::TensorOptions().device(kGpu).dtype(at::kBFloat16));
}

/// A layer's output and the gradient of its input, by the kernel of this name.
struct Products {
  at::Tensor y, dx;
};

struct Layer {
  nn::Linear linear{"weight", 2048, 1536};
  at::Tensor x = matrix(8192, 1536), dy = matrix(8192, 2048);

  Layer() {
    linear.weight().allocate(at::kBFloat16, kGpu);
    linear.weight().data().normal_();
  }
  Products run(const std::string& kernel, const ops::LinearPlace& place) {
    ops::KernelPolicy policy;
    policy.named["linear"] = kernel;
    const ops::KernelTable kernels =
        ops::KernelTable::choose(ops::builtin_registry(), ops::target_of(kGpu), at::kBFloat16,
                                 {ops::OpRequest::of<ops::Linear>()}, policy);
    linear.weight().linear_place() = place;
    const at::Tensor input = x.clone().set_requires_grad(true);
    const at::Tensor y = linear.forward(kernels, input);
    y.backward(dy);
    return {y.detach(), input.grad()};
  }
};

TEST_F(GpuEightBitModel, RoutersAndOutputsOfFirstBlocksStayInBf16) {
  Layer layer;
  const Products wide = layer.run("cuda.sm90_or_cublas", {.block = 7});
  const auto expect = [&](const std::string& kernel, const ops::LinearPlace& place,
                          bool output_is_wide, bool gradient_is_wide) {
    SCOPED_TRACE(::testing::Message() << kernel << ", block " << place.block);
    const Products found = layer.run(kernel, place);
    EXPECT_EQ(at::equal(found.y, wide.y), output_is_wide);
    EXPECT_EQ(at::equal(found.dx, wide.dx), gradient_is_wide);
  };
  for (const std::string kernel : {"cuda.fp8_rowwise_or_bf16", "cuda.fp8_rowwise_from_block_4"}) {
    const bool leaves_first = kernel.ends_with("4");
    expect(kernel, {}, false, false);
    expect(kernel, {.block = 0}, leaves_first, false);
    expect(kernel, {.block = 3}, leaves_first, false);
    expect(kernel, {.block = 4}, false, false);
    for (const std::int64_t block : {0, 20})
      expect(kernel, {.block = block, .is_router = true}, true, true);
  }
}

// Four blocks are a whole model here: its loss has the bits of bf16, its gradients have not.
TEST_F(GpuEightBitModel, BlocksTellTheirPlace) {
  const nlohmann::ordered_json json = {
      {"model_type", "qwen3_5_text"}, {"vocab_size", 512},
      {"hidden_size", 1024},          {"intermediate_size", 2048},
      {"num_hidden_layers", 4},       {"num_attention_heads", 8},
      {"num_key_value_heads", 2},     {"head_dim", 256},
      {"linear_num_key_heads", 16},   {"linear_num_value_heads", 16},
      {"linear_key_head_dim", 128},   {"linear_value_head_dim", 128},
      {"tie_word_embeddings", true}};
  const std::vector<data::Batch> batches = {testing::batch_of({{1, 4096}, {2, 4096}})};
  const auto run = [&](const std::string& linear, parallel::Recompute recompute) {
    runtime::Context context;
    context.device = kGpu;
    context.dtype = at::kBFloat16;
    models::ModelOptions options;
    options.kernel_policy.named["linear"] = linear;
    models::Model model(models::parse_config(json, "test"), "model.", context, options);
    model.allocate();
    model.initialize(11);
    return testing::differentiate(model, batches, recompute);
  };
  for (const auto recompute : {parallel::Recompute::kOff, parallel::Recompute::kFull}) {
    const auto wide = run("cuda.sm90_or_cublas", recompute),
               all = run("cuda.fp8_rowwise_or_bf16", recompute),
               later = run("cuda.fp8_rowwise_from_block_4", recompute);
    EXPECT_NE(all.loss, wide.loss);
    EXPECT_EQ(later.loss, wide.loss);
    const std::string name = "model.layers.0.mlp.gate_proj.weight";
    EXPECT_FALSE(at::equal(later.by_name.at(name), wide.by_name.at(name)));
  }
}

/// A mixture whose experts' products take 8 bits, with adapters on some of it.
assembly::ModelRecipe mixture(const std::vector<std::string>& target_parameters,
                              const std::map<std::string, std::string>& kernels) {
  const nlohmann::ordered_json json = {{"model_type", "qwen3_5_moe_text"},
                                       {"vocab_size", 512},
                                       {"hidden_size", 256},
                                       {"num_hidden_layers", 4},
                                       {"num_attention_heads", 4},
                                       {"num_key_value_heads", 2},
                                       {"head_dim", 256},
                                       {"linear_num_key_heads", 2},
                                       {"linear_num_value_heads", 4},
                                       {"linear_key_head_dim", 128},
                                       {"linear_value_head_dim", 128},
                                       {"num_experts", 8},
                                       {"num_experts_per_tok", 2},
                                       {"moe_intermediate_size", 128},
                                       {"shared_expert_intermediate_size", 128},
                                       {"tie_word_embeddings", true}};
  assembly::ModelRecipe recipe;
  recipe.config = models::parse_config(json, "test");
  recipe.purpose = assembly::Purpose::kTrain;
  recipe.weights = assembly::Weights::kRandomOnDevice;
  assembly::NewAdapters adapters;
  adapters.targets = {"all-linear"};
  adapters.target_parameters = target_parameters;
  recipe.adapters = adapters;
  recipe.kernels.named = kernels;
  recipe.kernels.named["frozen_experts"] = "cuda.fp8";
  return recipe;
}

/// A mixture like the one above, whose kernels `kernels.fp8` alone chooses.
assembly::ModelRecipe mixture_by_key(const std::vector<std::string>& target_parameters) {
  config::RunConfig config;
  config.kernels.fp8 = true;
  assembly::ModelRecipe recipe = mixture(target_parameters, {});
  recipe.kernels = assembly::kernel_policy(config);
  return recipe;
}

assembly::ModelOnRanks placed(const assembly::ModelRecipe& recipe) {
  runtime::Context context;
  context.device = kGpu;
  context.dtype = at::kBFloat16;
  return assembly::place(recipe, context);
}

void visit_experts(const assembly::ModelOnRanks& model,
                   const std::function<void(nn::Parameter&)>& visit) {
  for (const auto& layer : model.model->layers())
    layer->visit_expert_weights([&](nn::ExpertWeights& weights) { visit(weights.weight()); });
}

TEST_F(GpuEightBitModel, FrozenExpertsAreKeptInEightBitsAlone) {
  const assembly::ModelOnRanks model = placed(mixture({}, {}));
  int found = 0;
  visit_experts(model, [&](nn::Parameter& parameter) {
    EXPECT_FALSE(parameter.is_held()) << parameter.name();
    EXPECT_NE(ops::experts_beside(parameter.value()), nullptr) << parameter.name();
    EXPECT_EQ(parameter.value().storage().nbytes(), 0U) << parameter.name();
    ++found;
  });
  EXPECT_EQ(found, 8);
}

TEST(EightBitExperts, AreAskedForWhereAdaptersLeaveThemAloneAndRanksWhole) {
  const auto may = [](const assembly::ModelRecipe& recipe) {
    return assembly::may_keep_frozen_experts(recipe, comm::Mesh::single(), false);
  };
  const assembly::ModelRecipe recipe = mixture_by_key({});
  EXPECT_TRUE(may(recipe));
  EXPECT_FALSE(may(mixture_by_key({"experts.down_proj"})));
  assembly::ModelRecipe other = recipe;
  other.saved_whole = {"norm"};
  EXPECT_FALSE(may(other));
  other = recipe;
  other.kernels.named["moe_experts"] = "cuda.grouped_mm";
  EXPECT_FALSE(may(other));
  other = recipe;
  other.adapters = {};
  EXPECT_FALSE(may(other));
  other = recipe;
  other.purpose = assembly::Purpose::kScore;
  EXPECT_FALSE(may(other));
  const auto on_ranks = [](const assembly::ModelRecipe& recipe, const comm::Mesh::Sizes& sizes) {
    return assembly::may_keep_frozen_experts(recipe, comm::Mesh(sizes, 0, 2), true);
  };
  EXPECT_TRUE(on_ranks(recipe, {1, 1, 1, 2, 1}));
  EXPECT_TRUE(on_ranks(recipe, {1, 1, 1, 1, 2}));
  EXPECT_FALSE(on_ranks(recipe, {1, 1, 2, 1, 1}));
  other = recipe;
  other.generates = true;
  EXPECT_TRUE(may(other));
  EXPECT_FALSE(on_ranks(other, {1, 1, 1, 2, 1}));
}

TEST_F(GpuEightBitModel, OneKeyChoosesAllKernels) {
  using ::testing::IsSupersetOf;
  const auto lines = [](const std::vector<std::string>& target_parameters) {
    return placed(mixture_by_key(target_parameters)).model->kernels().lines();
  };
  const std::vector<std::string> always = {"linear: cuda.fp8_rowwise_from_block_4",
                                           "swiglu: cuda.fused_fp8", "rms_norm: cuda.fused_fp8"};
  EXPECT_THAT(lines({}), IsSupersetOf(always));
  EXPECT_THAT(lines({}), ::testing::Contains("frozen_experts: cuda.fp8"));
  // Experts with adapters stay as they are, and the key is no error.
  EXPECT_THAT(lines({"experts.down_proj"}), IsSupersetOf(always));
  EXPECT_THAT(lines({"experts.down_proj"}), ::testing::Contains("frozen_experts: as_loaded"));
}

TEST_F(GpuEightBitModel, FrozenExpertsAreRefusedWithAdaptersOnThem) {
  EXPECT_THAT(
      testing::message_of([] { placed(mixture({"experts.down_proj"}, {})); }),
      ::testing::AllOf(HasSubstr("kernels.frozen_experts: experts that have adapters"),
                       HasSubstr("(adapter.target_parameters)"), HasSubstr("leave the key out")));
}

TEST_F(GpuEightBitModel, FrozenExpertsAreRefusedByOtherProducts) {
  EXPECT_THAT(testing::message_of([] {
                placed(mixture({}, {{"moe_experts", "cuda.grouped_mm"}}));
              }),
              HasSubstr("leave kernels.moe_experts out"));
}

}  // namespace
}  // namespace heddle
