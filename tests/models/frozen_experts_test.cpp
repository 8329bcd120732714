// Which runs kernels.frozen_experts is refused to, before there is a model.
#include "assembly/frozen_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/ranks.h"
#include "models/tiny_model.h"
#include "testing/message_of.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

assembly::ModelRecipe recipe_naming(const std::string& form, bool moe = true) {
  assembly::ModelRecipe recipe;
  recipe.config = testing::tiny_config(moe);
  recipe.purpose = assembly::Purpose::kTrain;
  assembly::NewAdapters adapters;
  adapters.targets = {"all-linear"};
  recipe.adapters = adapters;
  recipe.kernels.named["frozen_experts"] = form;
  return recipe;
}

/// The refusal of an 8-bit form, in bf16 on one rank where nothing else is said.
std::string refusal(const assembly::ModelRecipe& recipe,
                    c10::ScalarType dtype = c10::ScalarType::BFloat16,
                    const comm::Mesh& mesh = comm::Mesh::single()) {
  return testing::message_of(
      [&] { assembly::require_frozen_experts(recipe, dtype, mesh, mesh.world_size() > 1); });
}

comm::Mesh two(comm::Dim dim) {
  comm::Mesh::Sizes sizes = {1, 1, 1, 1, 1};
  sizes[static_cast<std::size_t>(dim)] = 2;
  return {sizes, 0, 2};
}

TEST(FrozenExperts, AnEightBitFormIsForFrozenOnesThatARankHasWholeInBf16) {
  const assembly::ModelRecipe recipe = recipe_naming("cuda.fp8");
  EXPECT_EQ(refusal(recipe), "(no error)");
  const auto names = [](const char* reason) {
    return AllOf(StartsWith("kernels.frozen_experts: experts "), HasSubstr(reason),
                 HasSubstr("by 'as_loaded' alone, not by 'cuda.fp8'; leave the key out"));
  };
  EXPECT_THAT(refusal(recipe, c10::ScalarType::Float), names("in float32 (model.dtype)"));
  using comm::Dim;
  for (const Dim dim : {Dim::kTp, Dim::kCp, Dim::kFsdp}) {
    EXPECT_THAT(refusal(recipe, c10::ScalarType::BFloat16, two(dim)),
                names("that ranks divide (parallel.tp, cp, fsdp, ep)"));
  }
  EXPECT_THAT(refusal(recipe, c10::ScalarType::BFloat16, comm::Mesh({1, 1, 1, 2, 1}, 0, 2, 2)),
              names("that ranks divide"));
  assembly::ModelRecipe other = recipe;
  other.generates = true;
  EXPECT_EQ(refusal(other), "(no error)");
  for (const Dim dim : {Dim::kDp, Dim::kPp}) {
    EXPECT_EQ(refusal(recipe, c10::ScalarType::BFloat16, two(dim)), "(no error)");
    EXPECT_THAT(refusal(other, c10::ScalarType::BFloat16, two(dim)),
                names("of a run that generates, in a job of several ranks,"));
  }
  other = recipe;
  std::get<assembly::NewAdapters>(other.adapters).target_parameters = {"experts.down_proj"};
  EXPECT_THAT(refusal(other), names("that have adapters (adapter.target_parameters)"));
  for (const char* module : {"experts", "mlp", "layers.3.mlp"}) {
    other = recipe;
    other.saved_whole = {module};
    EXPECT_THAT(refusal(other), names("that are trained (adapter.modules_to_save)")) << module;
    other.freeze = {"*.experts.*"};
    EXPECT_EQ(refusal(other), "(no error)") << module;
  }
  for (const char* module : {"norm", "lm_head", "mlp.gate", "shared_expert"}) {
    other = recipe;
    other.saved_whole = {module};
    EXPECT_EQ(refusal(other), "(no error)") << module;
  }
  other = recipe;
  other.kernels.named["moe_experts"] = "reference";
  EXPECT_THAT(refusal(other), HasSubstr("reference, which kernels.moe_experts names, multiplies "
                                        "no experts in 8 bits; leave kernels.moe_experts out"));
}

TEST(FrozenExperts, AsLoadedIsForThemAll) {
  assembly::ModelRecipe recipe = recipe_naming("as_loaded");
  std::get<assembly::NewAdapters>(recipe.adapters).target_parameters = {"experts.down_proj"};
  recipe.kernels.named["moe_experts"] = "reference";
  EXPECT_EQ(refusal(recipe, c10::ScalarType::Float, two(comm::Dim::kTp)), "(no error)");
}

TEST(FrozenExperts, NoFormIsForARunWithoutThem) {
  EXPECT_THAT(refusal(recipe_naming("cuda.fp9")),
              HasSubstr("expected as_loaded or cuda.fp8, found 'cuda.fp9'"));
  for (const char* form : {"as_loaded", "cuda.fp8"}) {
    EXPECT_THAT(refusal(recipe_naming(form, /*moe=*/false)), HasSubstr("this model has none"));
    assembly::ModelRecipe recipe = recipe_naming(form);
    recipe.adapters = {};
    EXPECT_THAT(refusal(recipe), HasSubstr("this run trains no adapters"));
    recipe = recipe_naming(form);
    recipe.purpose = assembly::Purpose::kGenerate;
    EXPECT_THAT(refusal(recipe), HasSubstr("this run trains no adapters"));
  }
}

TEST(FrozenExperts, PlacingAModelRefusesInTheSameWords) {
  assembly::ModelRecipe recipe = recipe_naming("cuda.fp8");
  runtime::Context context;
  EXPECT_EQ(testing::message_of([&] { assembly::place(recipe, context); }),
            refusal(recipe, context.dtype));
  const auto errors = testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    runtime::Context rank;
    rank.dtype = c10::ScalarType::BFloat16;
    rank.mesh = comm::Mesh({1, 1, 2, 1, 1}, world);
    EXPECT_EQ(testing::message_of([&] { assembly::place(recipe, rank); }),
              refusal(recipe, rank.dtype, rank.mesh));
  });
  EXPECT_THAT(errors, ::testing::Each(""));
}

}  // namespace
}  // namespace heddle
