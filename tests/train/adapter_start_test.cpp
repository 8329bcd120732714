// Runs that go on from an adapter (adapter.path).
#include "train/adapter_start.h"

#include <cmath>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/json.h"
#include "testing/message_of.h"
#include "train/trainer_fixture.h"

namespace heddle {
namespace {

using ::testing::HasSubstr;
using Words = std::vector<std::string>;

class AdapterStart : public TrainerTest {
 protected:
  Words lora(Words more) const {
    more.insert(more.begin(), {"train.method=lora", "optim.warmup_steps=0"});
    return more;
  }
  /// Trains an adapter with these settings, and gives the settings of a run that goes on from it.
  Words trained(const std::string& run, const Words& more) const {
    Words all = lora({"train.max_steps=4", "optim.lr=1e-2"});
    all.insert(all.end(), more.begin(), more.end());
    train_until(config(run, all), 1000);
    return lora({"adapter.path=" + (dir_ / run / "final").string()});
  }
  config::RunConfig going_on(const std::string& run, Words from, const Words& more = {}) const {
    from.insert(from.end(), more.begin(), more.end());
    config::RunConfig read = config(run, from);
    train::take_adapter_settings(read);
    return read;
  }
  std::string adapter(const std::string& run) const {
    return weights(run, "final/adapter_model.safetensors");
  }
  /// A run that learns nothing ends with what it began with.
  void expect_same(const std::string& run, const Words& from, const Words& more = {}) const {
    Words all = {"optim.lr=0", "train.max_steps=2"};
    all.insert(all.end(), more.begin(), more.end());
    const std::string again = run + "-again";
    train_until(going_on(again, from, all), 1000);
    EXPECT_EQ(adapter(again), adapter(run)) << run;
    const auto json = [&](const std::string& of) {
      return json::parse(weights(of, "final/adapter_config.json"));
    };
    EXPECT_EQ(json(again), json(run)) << run;
  }
  std::string refusal(const Words& from, const Words& more) const {
    return testing::message_of([&] { train_until(going_on("refused", from, more), 1000); });
  }
};

TEST_F(AdapterStart, BeginsWithWhatTheAdapterIs) {
  expect_same("named", trained("named", {"adapter.rank=3", "adapter.alpha=5",
                                         "adapter.targets=[q_proj, in_proj_qkv]"}));
  expect_same("scaled", trained("scaled", {"adapter.rslora=true", "adapter.targets=[servable]"}));
  // A pattern of whole names has no short form.
  expect_same("whole", trained("whole", {"adapter.targets=['*.layers.1.*']"}));
  expect_same("beside", trained("beside", {"adapter.modules_to_save=[norm, embed_tokens]"}));
}

TEST_F(AdapterStart, FactorsOfExpertsComeInBothForms) {
  make_model("moe", {{"model_type", "qwen3_5_moe_text"},
                     {"num_experts", 6},
                     {"num_experts_per_tok", 2},
                     {"moe_intermediate_size", 24},
                     {"shared_expert_intermediate_size", 16}});
  const Words experts = {"model.path=" + (dir_ / "moe").string(), "adapter.rank=2",
                         "adapter.targets=[]",
                         "adapter.target_parameters=[mlp.experts.gate_up_proj, experts.down_proj]"};
  const std::string model = experts.front();
  expect_same("pairs", trained("pairs", experts), {model});
  Words shared = experts;
  shared.emplace_back("adapter.shared_expert_factors=true");
  const Words from = trained("shared", shared);
  expect_same("shared", from, {model, "adapter.shared_expert_factors=true"});
  ::testing::internal::CaptureStderr();
  train_until(going_on("apart", from, {model, "optim.lr=0", "train.max_steps=1"}), 1000);
  EXPECT_EQ(adapter("apart"), adapter("shared"));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("have a factor in common"));
}

TEST_F(AdapterStart, TheFirstLossIsTheAdaptersAndTheSettingsAreItsOwn) {
  const Words from = trained("first", {"adapter.rank=3", "adapter.alpha=5"});
  const config::RunConfig run = going_on("next", from, {"train.deterministic=true"});
  EXPECT_EQ(run.adapter.rank, 3);
  EXPECT_EQ(run.adapter.alpha, 5);
  std::vector<double> from_adapter, from_merged, from_base;
  train_until(run, 1, &from_adapter);
  ASSERT_EQ(run_cli({"export", (dir_ / "model").string(), "--adapter",
                     (dir_ / "first/final").string(), "--output", (dir_ / "merged").string()}),
            0);
  const Words same = lora({"adapter.rank=3", "adapter.alpha=5"});
  Words merged = same;
  merged.push_back("model.path=" + (dir_ / "merged").string());
  train_until(config("merged-run", merged), 1, &from_merged);
  train_until(config("base-run", same), 1, &from_base);
  EXPECT_NEAR(from_adapter[0], from_merged[0], 1e-5);
  EXPECT_GT(std::abs(from_adapter[0] - from_base[0]), 1e-3);
}

TEST_F(AdapterStart, AStoppedRunGoesOnWithTheSameBits) {
  const Words from = trained("first", {"adapter.rank=3"});
  train_until(going_on("whole", from), 1000);
  train_until(going_on("parts", from), 5);
  train_until(going_on("parts", from), 1000);
  EXPECT_EQ(adapter("whole"), adapter("parts"));
  EXPECT_NE(adapter("whole"), adapter("first"));
  // Another adapter would be another run.
  const Words other = trained("second", {"adapter.rank=3", "train.seed=8"});
  train_until(going_on("stopped", from), 5);
  EXPECT_THAT(testing::message_of([&] { train_until(going_on("stopped", other), 1000); }),
              HasSubstr("adapter.path"));
}

TEST_F(AdapterStart, GoesOnWithTheAdaptersTokens) {
  const Words from =
      trained("first", {"adapter.modules_to_save=[embed_tokens]", "model.added_tokens=[<new>]"});
  const config::RunConfig run = going_on("next", from, {"train.max_steps=1"});
  EXPECT_EQ(run.model.tokenizer, (dir_ / "first/final").string());
  train_until(run, 1000);
  EXPECT_EQ(weights("next", "final/tokenizer.json"), weights("first", "final/tokenizer.json"));
  EXPECT_EQ(
      going_on("other", from, {"model.tokenizer=" + (dir_ / "model").string()}).model.tokenizer,
      (dir_ / "model").string());
}

TEST_F(AdapterStart, MoreTargetsBeginAnew) {
  const Words from = trained("first", {"adapter.targets=[q_proj]"});
  ::testing::internal::CaptureStderr();
  train_until(going_on("more", from, {"adapter.targets=[q_proj, v_proj]", "train.max_steps=1"}),
              1000);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("v_proj"));
}

TEST_F(AdapterStart, RefusesWhatWouldBeLostOrIsSaidTwice) {
  const Words from = trained("first", {"adapter.rank=3", "adapter.targets=[q_proj, v_proj]",
                                       "adapter.modules_to_save=[norm]"});
  EXPECT_THAT(refusal(from, {"adapter.rank=4"}),
              ::testing::AllOf(HasSubstr("adapter.rank: is 4"), HasSubstr("has 3")));
  EXPECT_THAT(refusal(from, {"adapter.alpha=4"}), HasSubstr("adapter.alpha: is 4"));
  EXPECT_THAT(refusal(from, {"adapter.rslora=true"}), HasSubstr("adapter.rslora: is true"));
  EXPECT_THAT(refusal(from, {"adapter.targets=[q_proj]"}),
              ::testing::AllOf(HasSubstr("leave"), HasSubstr("v_proj")));
  EXPECT_THAT(
      refusal(from, {"adapter.modules_to_save=[embed_tokens]"}),
      ::testing::AllOf(HasSubstr("adapter.modules_to_save: leaves out"), HasSubstr("norm.weight")));
  EXPECT_THAT(refusal(from, {"adapter.shared_expert_factors=true"}),
              HasSubstr("adapter.shared_expert_factors: is of adapters on experts"));
  EXPECT_THAT(refusal(from, {"train.method=full"}), HasSubstr("needs train.method lora"));
  const Words run = lora({"adapter.path=" + (dir_ / "first").string()});
  EXPECT_THAT(refusal(run, {}), HasSubstr("the adapter of this run is"));
  const Words model = lora({"adapter.path=" + (dir_ / "model").string()});
  EXPECT_THAT(refusal(model, {}), HasSubstr("it is the folder of a model"));
  const Words nothing = lora({"adapter.path=" + (dir_ / "nothing").string()});
  EXPECT_THAT(refusal(nothing, {}), HasSubstr("there is no such adapter folder"));
}

}  // namespace
}  // namespace heddle
