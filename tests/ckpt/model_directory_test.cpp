#include "ckpt/model_directory.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ckpt/model_writer.h"
#include "fixtures.h"
#include "testing/temporary_directory.h"

namespace heddle::ckpt {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::is_identical;
using testing::message_of;
using testing::random_tensor;
using testing::write_model;

class ModelDirectories : public ::testing::Test {
 protected:
  std::string open_error() {
    return message_of<ModelError>([&] { ModelDirectory::open(dir_); });
  }
  void write_sharded() {
    write_model(dir_,
                {{"a", random_tensor("a", {3, 5})},
                 {"b", random_tensor("b", {29})},
                 {"c", random_tensor("c", {65}, at::kBFloat16)}},
                100);
  }
  nlohmann::ordered_json index() { return read_json_object(dir_ / "model.safetensors.index.json"); }
  void write_index(const nlohmann::ordered_json& json) {
    files::write_atomically(dir_ / "model.safetensors.index.json", json.dump());
  }

  heddle::testing::TemporaryDirectory temporary_;
  const Path dir_ = temporary_ / "model";
};

TEST_F(ModelDirectories, OpensASingleFile) {
  write_model(dir_, {{"a", random_tensor("a", {3, 5})}});
  files::write_atomically(dir_ / "generation_config.json", R"({"eos_token_id": [1, 2]})");
  const auto model = ModelDirectory::open(dir_);
  EXPECT_EQ(model.config()["model_type"], "test");
  EXPECT_EQ(model.generation_config()["eos_token_id"][1], 2);
  EXPECT_EQ(model.bytes(), 60u);
  EXPECT_EQ(model.weight_files(), std::vector<Path>{dir_ / "model.safetensors"});
  EXPECT_TRUE(is_identical(read_tensor(model.at("a")), random_tensor("a", {3, 5})));
  EXPECT_EQ(model.find("b"), nullptr);
}

TEST_F(ModelDirectories, OpensShards) {
  write_sharded();
  const auto model = ModelDirectory::open(dir_);
  EXPECT_EQ(model.tensors().size(), 3u);
  EXPECT_EQ(model.weight_files().size(), 3u);
  EXPECT_TRUE(model.generation_config().is_null());
  EXPECT_TRUE(is_identical(read_tensor(model.at("c")), random_tensor("c", {65}, at::kBFloat16)));
}

TEST_F(ModelDirectories, TheMapOutlivesTheDirectoryObjectAndTheFile) {
  write_sharded();
  const StoredTensor kept = ModelDirectory::open(dir_).at("b");
  std::filesystem::remove_all(dir_);
  EXPECT_TRUE(is_identical(read_tensor(kept), random_tensor("b", {29})));
}

TEST_F(ModelDirectories, ListsMissingShards) {
  write_sharded();
  std::filesystem::remove(dir_ / "model-00002-of-00003.safetensors");
  EXPECT_THAT(open_error(),
              HasSubstr("1 of 3 shards listed in model.safetensors.index.json are missing: "
                        "model-00002-of-00003.safetensors"));
}

TEST_F(ModelDirectories, ListsWhatIndexAndShardsDisagreeOn) {
  write_sharded();
  auto json = index();
  json["weight_map"]["ghost"] = "model-00001-of-00003.safetensors";
  json["weight_map"]["b"] = "model-00001-of-00003.safetensors";
  json["weight_map"]["d"] = "model-00002-of-00003.safetensors";
  json["weight_map"].erase("a");
  write_index(json);
  EXPECT_THAT(open_error(),
              AllOf(HasSubstr("3 tensors of the index are not in their shard: b (expected in "
                              "model-00001-of-00003.safetensors), d (expected in "
                              "model-00002-of-00003.safetensors), ghost (expected in"),
                    HasSubstr("1 tensors are in a shard and not in the index: a (in model-00001")));
}

TEST_F(ModelDirectories, ListsATensorInTwoShards) {
  write_sharded();
  std::filesystem::copy_file(dir_ / "model-00001-of-00003.safetensors", dir_ / "extra.safetensors");
  auto json = index();
  json["weight_map"]["z"] = "extra.safetensors";
  write_index(json);
  EXPECT_THAT(open_error(), AllOf(HasSubstr("1 tensors are in two shards: a (extra.safetensors and "
                                            "model-00001-of-00003.safetensors)")));
}

TEST_F(ModelDirectories, RefusesBadJson) {
  write_sharded();
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{", "not valid JSON"},
      {"[]", "must hold a JSON object"},
      {R"({"weight_map": []})",
       "'weight_map' (an object of tensor name and file name) is missing or empty"},
      {R"({"weight_map": {}})", "missing or empty"},
      {R"({"weight_map": {"a": 1}})", "'a' is said to be in 1, which is no plain file name"},
      {R"({"weight_map": {"a": "../../x"}})", "\"../../x\", which is no plain file name"},
      {R"({"weight_map": {"a": "x", "a": "y"}})", "the key 'a' occurs twice"},
  };
  for (const auto& [text, message] : cases) {
    files::write_atomically(dir_ / "model.safetensors.index.json", text);
    EXPECT_THAT(open_error(),
                AllOf(HasSubstr("model.safetensors.index.json: "), HasSubstr(message)));
  }
  files::write_atomically(dir_ / "config.json", "{\"a\": 1,\n \"b\": }");
  EXPECT_THAT(open_error(),
              AllOf(HasSubstr("config.json: not valid JSON"), HasSubstr("line 2, column 7")));
  std::filesystem::remove(dir_ / "config.json");
  EXPECT_THAT(open_error(), HasSubstr("config.json is missing"));
}

TEST_F(ModelDirectories, SaysWhatIsThereInsteadOfWeights) {
  EXPECT_THAT(open_error(), HasSubstr("there is no such folder"));
  std::filesystem::create_directory(dir_);
  EXPECT_THAT(open_error(),
              HasSubstr("no weights: expected model.safetensors or model.safetensors.index.json"));
  files::write_atomically(dir_ / "weights.safetensors", "");
  EXPECT_THAT(open_error(), HasSubstr("; found weights.safetensors"));
  files::write_atomically(dir_ / "pytorch_model-00001-of-00002.bin", "");
  EXPECT_THAT(open_error(),
              AllOf(HasSubstr("only PyTorch pickle files (pytorch_model-00001-of-00002.bin)"),
                    HasSubstr("save_pretrained")));
  files::write_atomically(dir_ / "adapter_model.safetensors", "");
  EXPECT_THAT(open_error(), HasSubstr("an adapter directory, not a model"));
  EXPECT_THAT(message_of<ModelError>([&] { ModelDirectory::open(dir_ / "weights.safetensors"); }),
              HasSubstr("a model is a folder with config.json and safetensors, this is a file"));
}

TEST_F(ModelDirectories, RefusesSingleFileBesideShards) {
  write_sharded();
  std::filesystem::copy_file(dir_ / "model-00001-of-00003.safetensors", dir_ / "model.safetensors");
  EXPECT_THAT(
      open_error(),
      HasSubstr("holds model.safetensors and model.safetensors.index.json, which does not"));
}

TEST_F(ModelDirectories, TakesAnIndexThatListsTheSingleFile) {
  write_model(dir_, {{"a", random_tensor("a", {3, 5})}, {"b", random_tensor("b", {2})}});
  write_index({{"weight_map", {{"a", "model.safetensors"}, {"b", "model.safetensors"}}}});
  EXPECT_EQ(ModelDirectory::open(dir_).tensors().size(), 2u);
  write_index({{"weight_map", {{"a", "model.safetensors"}}}});
  EXPECT_THAT(open_error(), HasSubstr("1 tensors are in a shard and not in the index: b"));
}

TEST_F(ModelDirectories, TakesFloat64) {
  write_model(dir_, {{"a", random_tensor("a", {3, 5}, at::kDouble)}});
  EXPECT_EQ(ModelDirectory::open(dir_).at("a").dtype, Dtype::kF64);
}

TEST_F(ModelDirectories, NamesTheFormatOfQuantisedWeightsAndItsRemedy) {
  const at::Tensor bytes = at::zeros({4, 4}, at::kByte), words = at::zeros({4, 4}, at::kInt),
                   scales = at::zeros({4}, at::kFloat);
  struct Case {
    std::vector<std::string> tensors;
    std::string config, message, remedy;
  };
  const std::vector<Case> cases = {
      {{"a.SCB", "a.weight_format"}, "{}", "(bitsandbytes 8 bit)", ".dequantize()"},
      {{"a.weight.absmax", "a.weight.quant_map"}, "{}", "(bitsandbytes 4 bit)", ".dequantize()"},
      {{"a.scales", "a.biases"}, R"({"quantization": {"bits": 4}})", "(MLX)", "mlx_lm convert"},
      {{"a.scales", "a.biases"}, "{}", "(MLX)", "mlx_lm convert"},
      {{"a.W_q", "a.scale", "a.zero"}, "{}", "(HQQ)", ""},
      {{"a.qweight", "a.qzeros", "a.g_idx"}, "{}", "(GPTQ)", ""},
      {{"a.qweight", "a.qzeros"}, "{}", "(GPTQ or AWQ)", ""},
      {{"a.qweight"}, R"({"quantization_config": {"quant_method": "awq"}})", "(AWQ)", ""},
      {{"a.weight_packed"}, "{}", "(compressed-tensors)", "run_compressed=False"},
      {{"a.gate_up_proj_blocks"}, "{}", "(MXFP4)", "Mxfp4Config"},
      {{"a.weight"}, R"({"quantization_config": {"quant_method": "quanto"}})", "(quanto)", ""},
      {{"a.weight"},
       R"({"text_config": {"quantization_config": {"quant_method": "gptq"}}})",
       "(GPTQ)",
       ""},
  };
  std::filesystem::create_directory(dir_);
  for (const Case& c : cases) {
    std::vector<NamedTensor> tensors;
    for (const std::string& name : c.tensors)
      tensors.push_back({name, name.ends_with(".scales") ? scales : bytes});
    files::write_atomically(dir_ / "config.json", c.config);
    write_tensors(dir_ / "model.safetensors", tensors);
    const std::string message = open_error();
    EXPECT_THAT(message, AllOf(HasSubstr("of a quantised checkpoint " + c.message),
                               HasSubstr("the unquantised release"), HasSubstr(c.remedy)));
    if (c.remedy.empty()) EXPECT_THAT(message, ::testing::Not(HasSubstr("python")));
  }
}

TEST_F(ModelDirectories, SaysThatAFolderIsOfARunOrOfAnotherProgram) {
  std::filesystem::create_directories(dir_ / "final");
  files::write_atomically(dir_ / "model.gguf", "GGUF");
  EXPECT_THAT(open_error(), HasSubstr("only GGUF files (model.gguf)"));
  files::write_atomically(dir_ / "config.resolved.yaml", "");
  EXPECT_THAT(open_error(), HasSubstr("the folder of a run, not a model: it has no final/ yet"));
  files::write_atomically(dir_ / "final" / "adapter_config.json", "{}");
  EXPECT_THAT(open_error(), HasSubstr("it trained an adapter: give the base model, and --adapter"));
  files::write_atomically(dir_ / "final" / "config.json", "{}");
  EXPECT_THAT(open_error(), HasSubstr("its model is " + (dir_ / "final").string()));
}

TEST_F(ModelDirectories, RefusesQuantisedWeightsAndSaysWhatToDo) {
  std::filesystem::create_directory(dir_);
  files::write_atomically(dir_ / "config.json", "{}");
  write_tensors(dir_ / "model.safetensors",
                {{"a.weight", random_tensor("a", {3, 5}).to(at::kFloat8_e4m3fn)},
                 {"b.weight_scale_inv", random_tensor("s", {1, 1})},
                 {"c.weight", random_tensor("b", {2})}});
  EXPECT_THAT(open_error(), AllOf(HasSubstr("2 tensors are of a quantised checkpoint (FP8): "
                                            "b.weight_scale_inv (F32), a.weight (F8_E4M3)"),
                                  HasSubstr("dequantize=True")));
}

}  // namespace
}  // namespace heddle::ckpt
