#include "ckpt/trained_adapter.h"

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/files.h"
#include "ckpt/adapter_configs.h"
#include "ckpt/fixtures.h"
#include "testing/message_of.h"
#include "testing/temporary_directory.h"

namespace heddle::ckpt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::random_tensor;
using Json = nlohmann::ordered_json;

class TrainedAdapters : public ::testing::Test {
 protected:
  /// Factors of these ranks on modules.
  using Factors = std::vector<std::pair<std::string, std::int64_t>>;

  AdapterDirectory directory(const Json& changes, const Factors& factors,
                             std::vector<NamedTensor> stored = {}) const {
    for (const auto& [module, rank] : factors) {
      const std::string name = "base_model.model." + module;
      stored.push_back({name + ".lora_A.weight", random_tensor(module + "a", {rank, 29})});
      stored.push_back({name + ".lora_B.weight", random_tensor(module + "b", {17, rank})});
    }
    std::filesystem::create_directories(dir_ / "a");
    files::write_atomically(dir_ / "a" / "adapter_config.json", config_json(changes).dump());
    write_tensors(dir_ / "a" / "adapter_model.safetensors", stored);
    return AdapterDirectory::open(dir_ / "a");
  }
  std::string refusal(const Json& changes, const Factors& factors,
                      std::vector<NamedTensor> stored = {}) const {
    return testing::message_of<ModelError>(
        [&] { trained_adapter(directory(changes, factors, std::move(stored))); });
  }

  heddle::testing::TemporaryDirectory dir_;
};

constexpr const char* kQuery = "model.layers.3.self_attn.q_proj";
constexpr const char* kUp = "model.layers.0.mlp.up_proj";

TEST_F(TrainedAdapters, NamesWhatItsConfigurationNames) {
  const TrainedAdapter found = trained_adapter(directory({}, {{kUp, 4}, {kQuery, 4}}));
  EXPECT_EQ(found.rank, 4);
  EXPECT_EQ(found.alpha, 8);
  EXPECT_FALSE(found.rslora);
  EXPECT_FALSE(found.has_shared_factors);
  EXPECT_THAT(found.targets, ::testing::UnorderedElementsAre("up_proj", "q_proj"));
  EXPECT_THAT(found.target_parameters, ::testing::IsEmpty());
}

// A name means each module that has it: with a restriction it would mean too many.
TEST_F(TrainedAdapters, NamesEachModuleWhereNamesWouldMeanMore) {
  for (const Json& changes :
       {Json{{"layers_to_transform", {0, 3}}}, Json{{"exclude_modules", {"layers.1.mlp.up_proj"}}},
        Json{{"target_modules", ".*(q|up)_proj"}}}) {
    EXPECT_THAT(trained_adapter(directory(changes, {{kUp, 4}, {kQuery, 4}})).targets,
                ElementsAre("layers.0.mlp.up_proj", "layers.3.self_attn.q_proj"))
        << changes;
  }
}

TEST_F(TrainedAdapters, TakesOneRankAndScaleOfPatterns) {
  const TrainedAdapter found = trained_adapter(
      directory({{"rank_pattern", {{"q_proj", 2}, {"up_proj", 2}}}}, {{kUp, 2}, {kQuery, 2}}));
  EXPECT_EQ(found.rank, 2);
  EXPECT_EQ(found.alpha, 8);  // PEFT leaves alpha as it is
  EXPECT_THAT(refusal({{"rank_pattern", {{"q_proj", 2}}}}, {{kUp, 4}, {kQuery, 2}}),
              HasSubstr("has rank 4 on model.layers.0.mlp.up_proj and 2 on"));
  EXPECT_THAT(refusal({{"alpha_pattern", {{"q_proj", 2}}}}, {{kUp, 4}, {kQuery, 4}}),
              HasSubstr("has scale 2 on model.layers.0.mlp.up_proj and 0.5 on"));
}

TEST_F(TrainedAdapters, RefusesByNameWhatIsNotTrained) {
  EXPECT_THAT(refusal({{"target_modules", {"lm_head"}}}, {{"lm_head", 4}}),
              ::testing::AllOf(HasSubstr("has factors on lm_head"),
                               HasSubstr("merge the adapter: heddle export BASE --adapter")));
  EXPECT_THAT(
      refusal(
          {{"target_modules", {"embed_tokens"}}}, {},
          {{"base_model.model.model.embed_tokens.lora_embedding_A", random_tensor("a", {4, 29})},
           {"base_model.model.model.embed_tokens.lora_embedding_B", random_tensor("b", {17, 4})}}),
      HasSubstr("has factors on model.embed_tokens"));
  EXPECT_THAT(refusal({}, {{"model.layers.0.mlp.experts.2.up_proj", 4}}),
              HasSubstr("has factors on model.layers.0.mlp.experts.2.up_proj"));
  EXPECT_THAT(refusal({{"target_modules", {"gate"}}}, {{"model.layers.0.mlp.gate", 4}}),
              HasSubstr("has factors on model.layers.0.mlp.gate"));
  EXPECT_THAT(refusal({{"target_modules", {"fc1"}}}, {{"model.visual.blocks.0.mlp.fc1", 4}}),
              HasSubstr("has factors on model.visual.blocks.0.mlp.fc1"));
}

}  // namespace
}  // namespace heddle::ckpt
