#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "adapter_configs.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/expert_pairs.h"
#include "ckpt/saved_modules.h"
#include "fixtures.h"
#include "testing/message_of.h"
#include "testing/temporary_directory.h"

namespace heddle::ckpt {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::is_identical;
using testing::message_of;
using testing::random_tensor;

TEST(AdapterNames, TranslatesAllSpellings) {
  const std::string text = "model.layers.3.mlp.up_proj";
  for (const std::string name :
       {"model.layers.3.mlp.up_proj", "model.language_model.layers.3.mlp.up_proj",
        "layers.3.mlp.up_proj", "language_model.layers.3.mlp.up_proj"}) {
    EXPECT_EQ(to_text_spelling(name), text);
    EXPECT_EQ(to_spelling(text, *spelling_of(name)), name);
  }
  EXPECT_EQ(to_spelling("lm_head", AdapterSpelling::kNested), "lm_head");
  EXPECT_EQ(to_spelling("model.visual.blocks.0.mlp.fc1", AdapterSpelling::kNested),
            "model.visual.blocks.0.mlp.fc1");
  EXPECT_EQ(to_text_spelling("embed_tokens.weight"), "model.embed_tokens.weight");
  EXPECT_EQ(spelling_of("score"), std::nullopt);
  EXPECT_EQ(spelling_for({{"architectures", {"Qwen3_5ForConditionalGeneration"}}}),
            AdapterSpelling::kNested);
  EXPECT_EQ(spelling_for({{"architectures", {"Qwen3NextForCausalLM"}}}), AdapterSpelling::kText);
  const nlohmann::ordered_json nested = {{"architectures", {"Qwen3_5Model"}},
                                         {"text_config", {{"x", 1}}}};
  EXPECT_EQ(spelling_for(nested), AdapterSpelling::kNested);
  EXPECT_EQ(spelling_for(nested, /*has_head=*/false), AdapterSpelling::kBareNested);
  EXPECT_EQ(spelling_for({{"architectures", {"Qwen3_5TextModel"}}}), AdapterSpelling::kText);
  EXPECT_EQ(spelling_for({{"architectures", {"Qwen3_5TextModel"}}}, /*has_head=*/false),
            AdapterSpelling::kBare);
  EXPECT_EQ(spelling_for(nlohmann::ordered_json::object()), AdapterSpelling::kText);
}

class AdapterDirectories : public ::testing::Test {
 protected:
  static AdapterTensors tensors() {
    return {{{"model.layers.0.self_attn.q_proj", "", random_tensor("a", {4, 29}),
              random_tensor("b", {63, 4})},
             {"model.layers.1.mlp.up_proj", "", random_tensor("c", {4, 29}),
              random_tensor("d", {17, 4})}},
            {{"lm_head.weight", random_tensor("h", {33, 29})}}};
  }
  static AdapterConfig config() { return parse({{"modules_to_save", {"lm_head"}}}); }
  /// An adapter directory of these raw tensors.
  std::string open_error(const nlohmann::ordered_json& json,
                         const std::vector<NamedTensor>& stored) {
    std::filesystem::create_directories(dir_ / "bad");
    files::write_atomically(dir_ / "bad" / "adapter_config.json", json.dump());
    write_tensors(dir_ / "bad" / "adapter_model.safetensors", stored);
    return message_of<ModelError>([&] { AdapterDirectory::open(dir_ / "bad"); });
  }
  heddle::testing::TemporaryDirectory dir_;
};

TEST_F(AdapterDirectories, RoundTripsInEverySpelling) {
  for (const AdapterSpelling spelling : {AdapterSpelling::kText, AdapterSpelling::kNested,
                                         AdapterSpelling::kBare, AdapterSpelling::kBareNested}) {
    const Path path = dir_ / fmt::format("adapter{}", static_cast<int>(spelling));
    write_adapter(path, config(), tensors(), spelling);
    EXPECT_TRUE(AdapterDirectory::is_one(path));
    const auto adapter = AdapterDirectory::open(path);
    EXPECT_EQ(adapter.spelling(), spelling);
    ASSERT_EQ(adapter.pairs().size(), 2u);
    for (std::size_t i = 0; i < 2; ++i) {
      const LoraPair& pair = adapter.pairs()[i];
      EXPECT_EQ(pair.module, tensors().pairs[i].module);
      EXPECT_TRUE(is_identical(read_tensor(pair.a), tensors().pairs[i].a));
      EXPECT_TRUE(is_identical(read_tensor(pair.b), tensors().pairs[i].b));
      EXPECT_EQ(pair.rank, 4);
      EXPECT_EQ(pair.scaling, 2.0);
    }
    ASSERT_EQ(adapter.saved().size(), 1u);
    EXPECT_EQ(adapter.saved()[0].name, "lm_head.weight");
  }
  const SafetensorsFile nested(dir_ / "adapter1" / "adapter_model.safetensors");
  EXPECT_NE(
      nested.find("base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"),
      nullptr);
  EXPECT_NE(nested.find("base_model.model.lm_head.weight"), nullptr);
}

TEST_F(AdapterDirectories, StoresInTheTypeAskedForAndCopiesTheTokenizer) {
  std::filesystem::create_directory(dir_ / "base");
  files::write_atomically(dir_ / "base" / "tokenizer.json", "{}");
  files::write_atomically(dir_ / "base" / "generation_config.json", "{}");
  TokenizerSource tokenizer(dir_ / "base");
  tokenizer.changed = {{"tokenizer_config.json", "{}"}};
  write_adapter(dir_ / "a", config(), tensors(), AdapterSpelling::kText, at::kBFloat16, tokenizer);
  EXPECT_EQ(AdapterDirectory::open(dir_ / "a").pairs()[0].a.dtype, Dtype::kBF16);
  EXPECT_TRUE(std::filesystem::exists(dir_ / "a" / "tokenizer.json"));
  EXPECT_TRUE(std::filesystem::exists(dir_ / "a" / "tokenizer_config.json"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "a" / "generation_config.json"));
  EXPECT_THROW(write_adapter(dir_ / "a", config(), tensors(), AdapterSpelling::kText), ConfigError);
  write_adapter(dir_ / "a", config(), tensors(), AdapterSpelling::kText, {}, {}, true);
  EXPECT_EQ(AdapterDirectory::open(dir_ / "a").pairs()[0].a.dtype, Dtype::kF32);
}

TEST_F(AdapterDirectories, ExpertParametersAreNestedAsPeftNestsThem) {
  const AdapterConfig both =
      parse({{"target_parameters", {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}},
             {"rank_pattern", {{"experts.down_proj", 2}}}});
  const std::string experts = "model.layers.0.mlp.experts";
  write_adapter(dir_ / "a", both,
                {{{experts, "gate_up_proj", at::zeros({12, 5}), at::zeros({14, 12})},
                  {experts, "down_proj", at::zeros({6, 7}), at::zeros({5, 6})}},
                 {}},
                AdapterSpelling::kText);
  const SafetensorsFile file(dir_ / "a" / "adapter_model.safetensors");
  EXPECT_EQ(file.at("base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight").shape,
            (std::vector<std::int64_t>{12, 5}));
  EXPECT_EQ(file.at("base_model.model.model.layers.0.mlp.experts.lora_A.weight").shape,
            (std::vector<std::int64_t>{6, 7}));
  const auto adapter = AdapterDirectory::open(dir_ / "a");
  ASSERT_EQ(adapter.pairs().size(), 2u);
  for (const LoraPair& pair : adapter.pairs()) {
    EXPECT_EQ(pair.module, experts);
    EXPECT_EQ(pair.rank, pair.parameter == "down_proj" ? 2 : 4);
    EXPECT_EQ(pair.a.shape[1], pair.parameter == "down_proj" ? 7 : 5);
  }
}

TEST_F(AdapterDirectories, TheCompactFormHasAFileOfItsOwnThatSaysWhatIsShared) {
  const AdapterConfig experts_of_rank_4 =
      parse({{"target_parameters", {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}}});
  const std::string experts = "model.layers.0.mlp.experts";
  const auto tensors = [&](AdapterForm form) {
    return AdapterTensors{
        {{experts, "gate_up_proj", random_tensor("a", {4, 5}), at::zeros({14, 12})},
         {experts, "down_proj", at::zeros({12, 7}), at::zeros({5, 4})}},
        {},
        form};
  };
  const Path compact = dir_ / "compact";
  write_adapter(compact, experts_of_rank_4, tensors(AdapterForm::kCompact), AdapterSpelling::kText);
  EXPECT_FALSE(std::filesystem::exists(compact / "adapter_model.safetensors"));
  const SafetensorsFile file(compact / "heddle_adapter.safetensors");
  EXPECT_EQ(file.metadata().at("expert_factors"), "shared_outer");
  const auto adapter = AdapterDirectory::open(compact);
  EXPECT_EQ(adapter.form(), AdapterForm::kCompact);
  ASSERT_EQ(adapter.pairs().size(), 2u);
  for (const LoraPair& pair : adapter.pairs()) {
    EXPECT_EQ(pair.rank, 4);
    if (pair.parameter == "gate_up_proj") {
      EXPECT_TRUE(is_identical(read_tensor(pair.a), random_tensor("a", {4, 5})));
    }
  }

  // PEFT's own form has as many rows of A as columns of B.
  EXPECT_THROW(write_adapter(dir_ / "peft", experts_of_rank_4, tensors(AdapterForm::kPeft),
                             AdapterSpelling::kText),
               InternalError);
  const auto opened = [&] {
    return message_of<ModelError>([&] { AdapterDirectory::open(compact); });
  };
  std::filesystem::copy(compact / "heddle_adapter.safetensors",
                        compact / "adapter_model.safetensors");
  EXPECT_THAT(opened(), HasSubstr("two adapters: remove one"));
  std::filesystem::remove(compact / "heddle_adapter.safetensors");
  EXPECT_THAT(opened(), HasSubstr("is [4, 5] and its B is [14, 12], expected"));
  std::filesystem::remove(compact / "adapter_model.safetensors");
  write_tensors(compact / "heddle_adapter.safetensors", {{"x", at::zeros({1})}});
  EXPECT_THAT(opened(), HasSubstr("metadata 'expert_factors' is '', this program reads"));
}

TEST_F(AdapterDirectories, InPeftsFormEachExpertHasTheFactorThatAllShare) {
  const AdapterConfig experts_of_rank_2 =
      parse({{"r", 2},
             {"target_modules", {"q_proj"}},
             {"target_parameters", {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}}});
  const std::string experts = "model.layers.0.mlp.experts";
  const at::Tensor shared_a = random_tensor("shared a", {2, 5}),
                   shared_b = random_tensor("shared b", {5, 2});
  const AdapterTensors given = {{{experts, "gate_up_proj", shared_a, random_tensor("b", {14, 6})},
                                 {experts, "down_proj", random_tensor("a", {6, 7}), shared_b},
                                 {"model.layers.0.self_attn.q_proj", "",
                                  random_tensor("q a", {2, 5}), random_tensor("q b", {8, 2})}},
                                {{"lm_head.weight", random_tensor("head", {9, 5})}},
                                AdapterForm::kCompact};
  write_adapter(dir_ / "compact", experts_of_rank_2, given, AdapterSpelling::kText, at::kBFloat16,
                {}, false,
                {{"tokenizer.json", "{}"},
                 {"id2label.json", "{}"},
                 {"1_Pooling/config.json", "{}"},
                 {"notes.txt", "mine"}});
  const Path path = dir_ / "peft";
  write_in_peft_form(AdapterDirectory::open(dir_ / "compact"), path, /*overwrite=*/false);
  for (const char* file : {"tokenizer.json", "id2label.json", "1_Pooling/config.json"})
    EXPECT_EQ(files::read(path / file), "{}");
  EXPECT_FALSE(std::filesystem::exists(path / "notes.txt"));
  const auto adapter = AdapterDirectory::open(path);
  EXPECT_EQ(adapter.form(), AdapterForm::kPeft);
  ASSERT_EQ(adapter.pairs().size(), 3u);
  ASSERT_EQ(adapter.saved().size(), 1u);
  for (const LoraPair& pair : adapter.pairs()) {
    if (pair.parameter.empty()) continue;
    const at::Tensor a = read_tensor(pair.a, at::kFloat), b = read_tensor(pair.b, at::kFloat);
    ASSERT_EQ(a.size(0), 6);
    ASSERT_EQ(b.size(1), 6);
    const bool is_down = pair.parameter == "down_proj";
    for (std::int64_t expert = 0; expert < 3; ++expert) {
      // PEFT takes A's rows expert by expert, and of B's columns every third.
      const at::Tensor own_a = a.narrow(0, 2 * expert, 2), own_b = b.slice(1, expert, 6, 3);
      const at::Tensor expected = is_down ? shared_b : shared_a;
      EXPECT_TRUE(is_identical((is_down ? own_b : own_a).contiguous(),
                               expected.to(at::kBFloat16).to(at::kFloat)))
          << pair.parameter << " " << expert;
    }
  }
  EXPECT_THROW(write_in_peft_form(adapter, dir_ / "compact", /*overwrite=*/false), ConfigError);
  write_in_peft_form(adapter, dir_ / "compact", /*overwrite=*/true);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "compact/heddle_adapter.safetensors"));
}

TEST_F(AdapterDirectories, ACompactPairIsOfOneExpertAndOfSeveral) {
  const std::string name = "base_model.model.model.layers.0.mlp.experts";
  const auto error_of = [&](std::int64_t rows, std::int64_t columns) {
    const Path path = dir_ / fmt::format("{}-{}", rows, columns);
    std::filesystem::create_directories(path);
    files::write_atomically(path / "adapter_config.json",
                            config_json({{"target_parameters", {"mlp.experts.down_proj"}}}).dump());
    const at::Tensor a = at::zeros({rows, 7}), b = at::zeros({5, columns});
    const std::vector<TensorSpec> specs = {spec_of(name + ".lora_A.weight", a),
                                           spec_of(name + ".lora_B.weight", b)};
    SafetensorsWriter writer(path / "heddle_adapter.safetensors", specs,
                             {{"expert_factors", "shared_outer"}});
    for (const TensorSpec& spec : writer.order())
      append_tensor(writer, spec.name, spec.name.ends_with("A.weight") ? a : b, spec.dtype);
    writer.commit();
    return ::heddle::testing::message_of([&] { AdapterDirectory::open(path); });
  };
  EXPECT_EQ(error_of(12, 4), "(no error)");
  EXPECT_EQ(error_of(4, 12), "(no error)");
  EXPECT_EQ(error_of(12, 12), "(no error)");
  EXPECT_THAT(error_of(8, 12), HasSubstr("is [8, 7] and its B is [5, 12], expected"));
  EXPECT_THAT(error_of(4, 10), HasSubstr("has rank 10, adapter_config.json says 4"));
}

TEST_F(AdapterDirectories, ListsTensorsThatDoNotFit) {
  const std::string q = "base_model.model.model.layers.0.self_attn.q_proj";
  const at::Tensor a = at::zeros({4, 5}), b = at::zeros({6, 4});
  EXPECT_THAT(open_error(config_json(), {{q + ".lora_A.weight", a}}),
              HasSubstr("q_proj.lora_A.weight' has no lora_B"));
  EXPECT_THAT(open_error(config_json(), {{q + ".lora_A.weight", b}, {q + ".lora_B.weight", b}}),
              HasSubstr("is [6, 4] and its B is [6, 4], expected [rank, in] and [out, rank]"));
  EXPECT_THAT(
      open_error(config_json({{"r", 3}}), {{q + ".lora_A.weight", a}, {q + ".lora_B.weight", b}}),
      HasSubstr("has rank 4, adapter_config.json says 3"));
  EXPECT_THAT(open_error(config_json({{"target_modules", {"k_proj"}}}),
                         {{q + ".lora_A.weight", a}, {q + ".lora_B.weight", b}}),
              HasSubstr("on a module that target_modules does not name"));
  EXPECT_THAT(open_error(config_json(), {{q + ".lora_magnitude_vector.weight", a}}),
              HasSubstr("(DoRA, bias or convolution)"));
  EXPECT_THAT(open_error(config_json(), {{"base_model.model.model.norm.weight", a}}),
              HasSubstr("is neither LoRA nor in modules_to_save"));
  EXPECT_THAT(open_error(config_json(), {{"model.layers.0.self_attn.q_proj.lora_A.weight", a}}),
              HasSubstr("does not begin with 'base_model.model.'"));
  EXPECT_THAT(open_error(config_json(), {{q + ".lora_A.weight", a.to(at::kLong)}}),
              HasSubstr("is I64, expected F32"));
  EXPECT_THAT(open_error(config_json(), {}), HasSubstr("holds no tensor"));
  const std::string nested = "base_model.model.model.language_model.layers.1.self_attn.q_proj";
  EXPECT_THAT(open_error(config_json(), {{q + ".lora_A.weight", a},
                                         {q + ".lora_B.weight", b},
                                         {nested + ".lora_A.weight", a},
                                         {nested + ".lora_B.weight", b}}),
              HasSubstr("spelled for more than one model class"));
}

TEST(AdapterNames, SavesModulesByTheEndingOfTheirNames) {
  for (const char* parameter :
       {"model.norm.weight", "model.layers.0.input_layernorm.weight",
        "model.layers.3.self_attn.q_norm.weight", "model.layers.0.linear_attn.norm.weight"}) {
    EXPECT_TRUE(is_saved_whole({"norm"}, parameter)) << parameter;
  }
  EXPECT_FALSE(is_saved_whole({"norm"}, "model.layers.0.mlp.up_proj.weight"));
  EXPECT_TRUE(is_saved_whole({"linear_attn"}, "model.layers.0.linear_attn.A_log"));
  EXPECT_TRUE(is_saved_whole({"layers.0.mlp"}, "model.layers.0.mlp.up_proj.weight"));
  EXPECT_FALSE(is_saved_whole({"layers.0.mlp"}, "model.layers.10.mlp.up_proj.weight"));
  EXPECT_FALSE(is_saved_whole({"A_log"}, "model.layers.0.linear_attn.A_log"));
  EXPECT_FALSE(is_saved_whole({""}, "model.norm.weight"));
}

TEST(AdapterNames, WritesModulesSoThatTheirEndingsMeanTheTrainedOnes) {
  const std::vector<std::string> all = {"model.embed_tokens.weight",
                                        "model.layers.0.input_layernorm.weight",
                                        "model.layers.0.linear_attn.A_log",
                                        "model.layers.0.linear_attn.norm.weight",
                                        "model.layers.1.input_layernorm.weight",
                                        "model.norm.weight",
                                        "lm_head.weight"};
  const auto entries = [&](const std::set<std::string>& trained) {
    return modules_to_save(trained, all).entries;
  };
  EXPECT_THAT(entries({"model.embed_tokens.weight"}), ElementsAre("embed_tokens"));
  EXPECT_THAT(entries({"model.norm.weight"}), ElementsAre("model.norm"));
  EXPECT_THAT(entries({"model.layers.1.input_layernorm.weight"}),
              ElementsAre("model.layers.1.input_layernorm"));
  EXPECT_THAT(
      entries({"model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"}),
      ElementsAre("input_layernorm"));
  // A parameter that is no module comes with the module that holds it.
  const SavedModules whole = modules_to_save({"model.layers.0.linear_attn.A_log"}, all);
  EXPECT_THAT(whole.entries, ElementsAre("model.layers.0.linear_attn"));
  EXPECT_THAT(whole.parameters, ElementsAre("model.layers.0.linear_attn.A_log",
                                            "model.layers.0.linear_attn.norm.weight"));
  // Where no name is longer, whatever ends like it is written too.
  EXPECT_THAT(modules_to_save({"norm.weight"},
                              {"norm.weight", "layers.0.input_layernorm.weight", "lm_head.weight"})
                  .parameters,
              ElementsAre("norm.weight", "layers.0.input_layernorm.weight"));
}

TEST(AdapterNames, TargetsParametersOfTheModulesThatHaveThem) {
  const AdapterConfig config = parse({{"target_parameters", {"gate_up_proj", "down_proj"}}});
  EXPECT_THAT(targeted_parameters(config, "model.layers.0.mlp.experts"),
              ElementsAre("gate_up_proj", "down_proj"));
  for (const char* module : {"model.layers.0.linear_attn.out_proj", "model.layers.0.mlp.gate",
                             "model.layers.0.mlp.shared_expert.down_proj"}) {
    EXPECT_TRUE(targeted_parameters(config, module).empty()) << module;
  }
  const AdapterConfig router = parse({{"target_parameters", {"mlp.gate.weight"}}});
  EXPECT_THAT(targeted_parameters(router, "model.layers.0.mlp.gate"), ElementsAre("weight"));
}

TEST_F(AdapterDirectories, ReadsEveryKindOfTensorThatPeftWrites) {
  const std::string model = "base_model.model.model.";
  const std::string q = model + "language_model.layers.0.self_attn.q_proj";
  const std::string qkv = model + "visual.blocks.0.attn.qkv", merger = model + "visual.merger.norm";
  const std::string table = model + "language_model.embed_tokens";
  const at::Tensor a = random_tensor("a", {4, 5}), b = random_tensor("b", {6, 4});
  std::filesystem::create_directories(dir_ / "peft");
  files::write_atomically(
      dir_ / "peft" / "adapter_config.json",
      config_json({{"target_modules", {"q_proj", "qkv", "embed_tokens", "lm_head"}},
                   {"modules_to_save", {"merger.norm"}},
                   {"ensure_weight_tying", true}})
          .dump());
  write_tensors(dir_ / "peft" / "adapter_model.safetensors",
                {{q + ".lora_A.default.weight", a},
                 {q + ".lora_B.default.weight", b},
                 {qkv + ".lora_A.weight", a},
                 {qkv + ".lora_B.weight", b},
                 {table + ".lora_embedding_A", random_tensor("e", {4, 33})},
                 {table + ".lora_embedding_B.default", random_tensor("f", {5, 4})},
                 {table + ".base_layer.weight", random_tensor("g", {33, 5})},
                 {"base_model.model.lm_head.lora_A.weight", a},
                 {"base_model.model.lm_head.lora_B.weight", random_tensor("h", {33, 4})},
                 {merger + ".modules_to_save.default.weight", random_tensor("m", {5})}});
  const auto adapter = AdapterDirectory::open(dir_ / "peft");
  EXPECT_TRUE(adapter.config().ensure_weight_tying);
  std::vector<std::string> modules;
  for (const LoraPair& pair : adapter.pairs()) modules.push_back(pair.module);
  EXPECT_THAT(modules,
              ElementsAre("lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj"));
  EXPECT_TRUE(adapter.pairs()[1].is_embedding);
  EXPECT_TRUE(is_identical(read_tensor(adapter.pairs()[2].a), a));
  ASSERT_EQ(adapter.vision_pairs().size(), 1u);
  EXPECT_EQ(adapter.vision_pairs()[0].module, "model.visual.blocks.0.attn.qkv");
  ASSERT_EQ(adapter.vision_saved().size(), 1u);
  EXPECT_EQ(adapter.vision_saved()[0].name, "model.visual.merger.norm.weight");
  ASSERT_EQ(adapter.saved().size(), 1u);
  EXPECT_EQ(adapter.saved()[0].name, "model.embed_tokens.weight");
  EXPECT_TRUE(adapter.saved()[0].is_base);
}

TEST_F(AdapterDirectories, RefusesTwoAdaptersInOneFile) {
  const std::string q = "base_model.model.model.layers.0.self_attn.q_proj";
  const at::Tensor a = at::zeros({4, 5});
  EXPECT_THAT(open_error(config_json(),
                         {{q + ".lora_A.default.weight", a}, {q + ".lora_A.other.weight", a}}),
              HasSubstr("are of two adapters"));
}

TEST_F(AdapterDirectories, StacksAdaptersOfSingleExperts) {
  const std::string experts = "base_model.model.model.layers.1.mlp.experts.";
  std::vector<NamedTensor> stored;
  for (const char* expert : {"0", "2"}) {
    for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
      const bool is_down = std::string(projection) == "down_proj";
      const std::string name = experts + expert + "." + projection;
      stored.push_back({name + ".lora_A.weight", random_tensor(name + "a", {4, is_down ? 6 : 5})});
      stored.push_back({name + ".lora_B.weight", random_tensor(name + "b", {is_down ? 5 : 6, 4})});
    }
  }
  std::filesystem::create_directories(dir_ / "single");
  files::write_atomically(
      dir_ / "single" / "adapter_config.json",
      config_json({{"target_modules", {"gate_proj", "up_proj", "down_proj"}}}).dump());
  write_tensors(dir_ / "single" / "adapter_model.safetensors", stored);
  const auto adapter = AdapterDirectory::open(dir_ / "single");
  std::vector<const LoraPair*> pairs;
  for (const LoraPair& pair : adapter.pairs()) pairs.push_back(&pair);
  const std::vector<StackedExperts> stacked = stack_experts(pairs);
  EXPECT_TRUE(pairs.empty());
  ASSERT_EQ(stacked.size(), 2u);
  EXPECT_EQ(stacked[0].parameter, "down_proj");
  EXPECT_EQ(stacked[1].module, "model.layers.1.mlp.experts");
  EXPECT_EQ(stacked[1].rank, 8);
  const auto [a, b] = stacked[1].factors(3, 12, 5);
  const at::Tensor change = at::matmul(b, a);  // [expert, gate and up, in]
  EXPECT_TRUE(change.select(0, 1).eq(0).all().item<bool>());
  const std::string up = experts + "2.up_proj";
  const at::Tensor expected = 2.0 * at::mm(random_tensor(up + "b", {6, 4}).to(at::kDouble),
                                           random_tensor(up + "a", {4, 5}).to(at::kDouble));
  EXPECT_TRUE(at::allclose(change.select(0, 2).narrow(0, 6, 6), expected));
  EXPECT_THAT(message_of<ModelError>([&] { stacked[1].factors(2, 12, 5); }),
              HasSubstr("this model has 2 experts"));
}

TEST_F(AdapterDirectories, SaysWhatIsMissing) {
  EXPECT_THAT(message_of<ModelError>([&] { AdapterDirectory::open(dir_ / "none"); }),
              HasSubstr("no such adapter folder"));
  std::filesystem::create_directory(dir_ / "a");
  EXPECT_FALSE(AdapterDirectory::is_one(dir_ / "a"));
  EXPECT_THAT(message_of<ModelError>([&] { AdapterDirectory::open(dir_ / "a"); }),
              HasSubstr("adapter_config.json is missing"));
  files::write_atomically(dir_ / "a" / "adapter_config.json", config_json().dump());
  files::write_atomically(dir_ / "a" / "adapter_model.bin", "");
  EXPECT_THAT(message_of<ModelError>([&] { AdapterDirectory::open(dir_ / "a"); }),
              AllOf(HasSubstr("adapter_model.safetensors is missing"),
                    HasSubstr("adapter_model.bin is a pickle")));
}

TEST_F(AdapterDirectories, WritingGuardsItsCaller) {
  AdapterTensors wrong_rank = tensors();
  wrong_rank.pairs[0].a = at::zeros({3, 29});
  EXPECT_THROW(write_adapter(dir_ / "a", config(), wrong_rank, AdapterSpelling::kText),
               InternalError);
  AdapterTensors no_target = tensors();
  no_target.pairs[0].module = "model.layers.0.self_attn.k_proj";
  EXPECT_THROW(write_adapter(dir_ / "a", config(), no_target, AdapterSpelling::kText),
               InternalError);
  AdapterTensors twice = tensors();
  twice.pairs.push_back(twice.pairs[0]);
  EXPECT_THROW(write_adapter(dir_ / "a", config(), twice, AdapterSpelling::kText), InternalError);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "a"));
}

}  // namespace
}  // namespace heddle::ckpt
