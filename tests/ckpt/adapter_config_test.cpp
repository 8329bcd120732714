#include <cmath>
#include <ctime>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "adapter_configs.h"
#include "base/json.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/saved_modules.h"
#include "fixtures.h"

namespace heddle::ckpt {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

TEST(AdapterConfigs, ManyPatternsTakeLittleTimeOrAreRefused) {
  const auto patterns = [](const std::string& before, int count, const std::string& after) {
    nlohmann::json all = nlohmann::json::object();
    for (int i = 0; i < count; ++i) all[before + std::to_string(i) + after] = 1 + i % 7;
    return json::parse(all.dump());  // which looks for no key by a scan
  };
  const auto names = [](int count) {
    return nlohmann::ordered_json(std::vector<std::string>(static_cast<std::size_t>(count), "q"));
  };
  const auto error = [](const char* key, const nlohmann::ordered_json& value) {
    return message_of<ModelError>([&] { parse({{key, value}}); });
  };
  EXPECT_THAT(error("rank_pattern", patterns("q", 65'537, "")), HasSubstr("has 65537 entries"));
  EXPECT_THAT(error("alpha_pattern", patterns("(a|b)*", 257, "")),
              HasSubstr("'alpha_pattern' has more than 256 regular expressions"));
  EXPECT_THAT(error("target_modules", names(70'000)), HasSubstr("has 70000 entries"));
  EXPECT_THAT(error("exclude_modules", names(65'537)), HasSubstr("at most 65536 are read"));
  EXPECT_THAT(error("modules_to_save", std::vector<std::string>(257, "(a|b)*")),
              HasSubstr("'modules_to_save' has more than 256 regular expressions"));
  // Names of modules, which a run of all layers writes, are no expressions.
  EXPECT_EQ(parse({{"modules_to_save", names(300)}}).modules_to_save.size(), 300u);
  const AdapterConfig config = parse({{"rank_pattern", patterns("layers.", 60'000, ".q_proj")}});
  const std::clock_t begin = std::clock();  // of the processor: machines may be busy
  for (int i = 59'000; i < 59'200; ++i) {
    const std::string name = "layers." + std::to_string(i);
    EXPECT_EQ(config.rank_of("model." + name + ".q_proj"), 1 + i % 7);
    EXPECT_EQ(config.rank_of(name + ".k_proj"), 4);
  }
  EXPECT_LT(std::clock() - begin, 20 * CLOCKS_PER_SEC);
}

TEST(AdapterConfigs, PlainPatternsFitAsExpressionsDo) {
  const auto rank = [](const std::string& pattern, const std::string& module) {
    return parse({{"rank_pattern", {{pattern, 9}}}}).rank_of(module);
  };
  for (const auto& [pattern, module, fits] : {std::tuple{"q_proj", "a.q_proj", true},
                                              {"q_proj", "q_proj", true},
                                              {"q_proj", "a.xq_proj", false},
                                              {"q_proj", "a.q_proj.b", false},
                                              {"a.q", "x.a.q", true},
                                              {"a.q", "x.a_q", true},
                                              {"a.q", "xa.q", false},
                                              {"x.a.q", "a.q", false},
                                              {"", "a", false},
                                              {"", "a.", true}}) {
    EXPECT_EQ(rank(pattern, module) == 9, fits) << pattern << " " << module;
    EXPECT_EQ(rank("(?:" + std::string(pattern) + ")", module) == 9, fits) << pattern;
  }
}

TEST(AdapterConfigs, RoundTripsThroughJson) {
  AdapterConfig config;
  config.base_model_name_or_path = "models/base";
  config.task_type = "SEQ_CLS";
  config.rank = 16;
  config.alpha = 12.5;
  config.dropout = 0.05;
  config.use_rslora = true;
  config.target_modules = {"q_proj", "in_proj_qkv"};
  config.exclude_modules = {"layers.0.self_attn.q_proj"};
  config.target_parameters = {"mlp.experts.down_proj"};
  config.modules_to_save = {"score"};
  config.rank_pattern = {{"^model.layers.0.*", 4}};
  config.alpha_pattern = {{"q_proj", 3}};
  config.layers_to_transform = {0, 2};
  const auto json = config.to_json();
  EXPECT_EQ(AdapterConfig::from_json(json, "x").to_json(), json);
  EXPECT_EQ(json["peft_type"], "LORA");
  EXPECT_EQ(json["bias"], "none");
  EXPECT_EQ(json["lora_alpha"], 12.5);
  EXPECT_TRUE(AdapterConfig().to_json()["lora_alpha"].is_number_integer());
}

TEST(AdapterConfigs, PatternsGiveRankAlphaAndScaling) {
  const AdapterConfig config =
      parse({{"rank_pattern", {{"layers.0.self_attn.q_proj", 2}, {".*\\.up_proj", 16}}},
             {"alpha_pattern", {{"up_proj", 32}}}});
  EXPECT_EQ(config.rank_of("model.layers.0.self_attn.q_proj"), 2);
  EXPECT_EQ(config.rank_of("model.layers.10.self_attn.q_proj"), 4);
  EXPECT_EQ(config.rank_of("model.layers.3.mlp.up_proj"), 16);
  EXPECT_EQ(config.rank_of("model.layers.3.mlp.gate_up_proj"), 4);
  EXPECT_EQ(config.scaling_of("model.layers.0.self_attn.q_proj"), 4.0);
  EXPECT_EQ(config.scaling_of("model.layers.3.mlp.up_proj"), 2.0);
  EXPECT_EQ(parse({{"use_rslora", true}}).scaling_of("q_proj"), 8.0 / std::sqrt(4.0));
}

TEST(AdapterConfigs, TargetsAsPeftDoes) {
  const AdapterConfig list = parse({{"exclude_modules", {"layers.1.self_attn.q_proj"}}});
  EXPECT_TRUE(list.targets("model.layers.0.self_attn.q_proj"));
  EXPECT_FALSE(list.targets("model.layers.1.self_attn.q_proj"));
  EXPECT_FALSE(list.targets("model.layers.0.mlp.gate_up_proj"));
  const AdapterConfig pattern = parse({{"target_modules", ".*layers\\.(0|1)\\..*\\.(q|v)_proj"}});
  EXPECT_TRUE(pattern.targets("model.layers.1.self_attn.v_proj"));
  EXPECT_FALSE(pattern.targets("model.layers.11.self_attn.v_proj"));
  const AdapterConfig layers = parse({{"layers_to_transform", {0, 12}}});
  EXPECT_TRUE(layers.targets("model.layers.12.self_attn.q_proj"));
  EXPECT_FALSE(layers.targets("model.layers.1.self_attn.q_proj"));
  const AdapterConfig all = parse({{"target_modules", "all-linear"}});
  EXPECT_TRUE(all.targets("model.layers.12.linear_attn.in_proj_a"));
  EXPECT_FALSE(all.targets("lm_head"));
  const AdapterConfig saved = parse({{"modules_to_save", {"q_proj"}}});
  EXPECT_FALSE(saved.targets("model.layers.0.self_attn.q_proj"));
}

TEST(AdapterConfigs, PlainSavedModulesFitAsExpressionsDo) {
  for (const auto& [saved, module, fits] : {std::tuple{"q_proj", "q_proj", true},
                                            {"q_proj", "a.q_proj", true},
                                            {"a", "a.b.q_proj", true},
                                            {"b", "a.b.q_proj", true},
                                            {"a.b", "x.a.b.q_proj", true},
                                            {"a.b", "x.a_b.q_proj", true},
                                            {"b", "a.xb.q_proj", false},
                                            {"a", "ax.b.q_proj", false},
                                            {"proj", "a.q_proj", false},
                                            {"a.b.q_proj.c", "a.b.q_proj", false},
                                            {"layers.1", "layers.10.q_proj", false},
                                            {"", "a.q_proj", false},
                                            {"", ".q_proj", true}}) {
    const auto is_target = [&, &name = module](const std::string& entry) {
      return parse({{"modules_to_save", {entry}}, {"target_modules", "all-linear"}}).targets(name);
    };
    EXPECT_EQ(is_target(saved), !fits) << saved << " " << module;
    EXPECT_EQ(is_target("(?:" + std::string(saved) + ")"), !fits) << saved << " " << module;
  }
}

TEST(AdapterConfigs, NamesTheKeyOfWhatIsNotSupported) {
  const std::vector<std::pair<nlohmann::ordered_json, std::string>> cases = {
      {{{"peft_type", "IA3"}}, "'peft_type' is 'IA3': only LORA"},
      {{{"peft_type", nullptr}}, "'peft_type' is missing"},
      {{{"bias", "lora_only"}}, "'bias' is 'lora_only'"},
      {{{"use_dora", true}}, "'use_dora' is true: DoRA is not supported"},
      {{{"lora_bias", true}}, "'lora_bias' is true"},
      {{{"fan_in_fan_out", true}}, "'fan_in_fan_out' is true"},
      {{{"layer_replication", {{0, 4}, {2, 5}}}}, "'layer_replication' is [[0,4],[2,5]]"},
      {{{"trainable_token_indices", {1, 2}}}, "'trainable_token_indices' is [1,2]"},
      {{{"loftq_config", {{"loftq_bits", 4}}}}, "'loftq_config' is {\"loftq_bits\":4}"},
      {{{"init_lora_weights", "pissa"}}, "'init_lora_weights' is \"pissa\""},
      {{{"r", 0}}, "'r' must be a whole number above 0, is 0"},
      {{{"r", "8"}}, "'r' must be a whole number above 0, is \"8\""},
      {{{"lora_alpha", "x"}}, "'lora_alpha' must be a number"},
      {{{"lora_dropout", 1.0}}, "'lora_dropout' must be in [0, 1), is 1"},
      {{{"use_rslora", 1}}, "'use_rslora' must be true or false, is 1"},
      {{{"target_modules", nullptr}}, "'target_modules' names nothing"},
      {{{"target_modules", {1}}}, "'target_modules' must be a list of names, holds 1"},
      {{{"target_modules", "(q_proj"}},
       "'target_modules': not a regular expression at its character 7"},
      {{{"rank_pattern", {{"q_proj", -1}}}},
       "'rank_pattern' must be a whole number above 0, is -1"},
      {{{"alpha_pattern", {1}}}, "'alpha_pattern' must be an object"},
  };
  for (const auto& [changes, message] : cases) {
    EXPECT_THAT(message_of<ModelError>([&] { parse(changes); }),
                AllOf(HasSubstr("adapter_config.json: "), HasSubstr(message)))
        << changes;
  }
}

}  // namespace
}  // namespace heddle::ckpt
