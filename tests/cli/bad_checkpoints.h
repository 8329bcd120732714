#pragma once

#include <cstring>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "bad_input_case.h"

namespace heddle::cli {

/// A safetensors file of one-byte tensors, for headers that Heddle would never write.
inline std::string safetensors(const nlohmann::ordered_json& header) {
  const std::string text = header.dump();
  const std::uint64_t length = text.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + text + std::string(16, '\0');
}

/// Checkpoints, adapters and checkpoints of training that no program should have written.
inline const std::vector<BadInputCase>& bad_checkpoints() {
  static const std::vector<BadInputCase> cases = {
      {"NoSuchModel",
       [](const Folder& f) { return f.train({"model.path=" + f.at("none")}); },
       2,
       {"{dir}/none: there is no such folder"}},
      {"NameOnTheHub",
       [](const Folder& f) {
         // A hub at which nobody listens.
         setenv("HF_ENDPOINT", "http://127.0.0.1:9", 1);
         return f.train({"model.path=Qwen/Qwen3.5-of-nobody"});
       },
       2,
       {"Qwen/Qwen3.5-of-nobody: there is no such file or folder here",
        "hf download Qwen/Qwen3.5-of-nobody"}},
      {"ShareOfTheRows",
       [](const Folder& f) { return f.train({"data.eval=1.5"}); },
       2,
       {"data.eval: a share of the training rows is above 0 and below 1, found 1.5"}},
      {"TwoWarmUps",
       [](const Folder& f) {
         return f.train({"optim.warmup_steps=2", "optim.warmup_ratio=0.1"});
       },
       2,
       {"optim.warmup_ratio", "is given beside optim.warmup_steps"}},
      {"FolderOfARun",
       [](const Folder& f) {
         fs::create_directories(f.at("old/final"));
         f.write("old/config.resolved.yaml", "");
         f.write("old/final/config.json", "{}");
         return f.train({"model.path=" + f.at("old")});
       },
       2,
       {"{dir}/old: the folder of a run, not a model: its model is {dir}/old/final"}},
      {"VocabularyThatIsNotTheTable",
       [](const Folder& f) {
         f.replace("model/config.json", "\"vocab_size\": 4096", "\"vocab_size\": 4200");
         return f.train();
       },
       2,
       {"model.embed_tokens.weight is [4096, 32], expected [4200, 32]"}},
      {"TwoRopes",
       [](const Folder& f) {
         f.replace("model/config.json", "\"vocab_size\"",
                   R"("rope_parameters": {"rope_type": "default"},
                      "rope_scaling": {"rope_type": "yarn", "factor": 4}, "vocab_size")");
         return f.train();
       },
       2,
       {"{dir}/model/config.json: 'rope_parameters'", "'rope_scaling'", "differ"}},
      {"ClassifierAsALanguageModel",
       [](const Folder& f) {
         f.replace("model/config.json", "\"vocab_size\"",
                   R"("architectures": ["Qwen3_5ForSequenceClassification"], "vocab_size")");
         return Arguments{"generate", f.at("model"), "--prompt", "a"};
       },
       2,
       {"{dir}/model is a classifier: it has no language-model head"}},
      {"WeightsThatAreNotFinite",
       [](const Folder& f) {
         f.spoil("model.layers.1.mlp.up_proj.weight");
         return Arguments{"score",    f.at("model"),       "--input", f.at("train.jsonl"),
                          "--output", f.at("scored.jsonl")};
       },
       2,
       {"{dir}/train.jsonl:1: the model's output is not finite, first in layer 1: "
        "model.layers.1.mlp.up_proj.weight holds NaN or infinity"}},
      {"LogitsThatAreNotFinite",
       [](const Folder& f) {
         f.spoil("model.norm.weight");
         return Arguments{"generate", f.at("model"), "--prompt", "a"};
       },
       2,
       {"request 1: the logits are not finite, first in the final norm: model.norm.weight holds"}},
      {"NoConfiguration",
       [](const Folder& f) {
         fs::remove(f.at("model/config.json"));
         return f.train();
       },
       2,
       {"{dir}/model: config.json is missing"}},
      {"UnknownModelType",
       [](const Folder& f) {
         f.replace("model/config.json", "qwen3_5_text", "llama");
         return f.train();
       },
       2,
       {"{dir}/model/config.json: model_type 'llama' is not one of", "qwen3_next"}},
      {"CutWeights",
       [](const Folder& f) {
         fs::resize_file(f.at("model/model.safetensors"), 300000);
         return f.train();
       },
       2,
       {"{dir}/model/model.safetensors: tensor 'model.embed_tokens.weight' ends at byte",
        "cut off or damaged"}},
      {"MissingTensors",
       [](const Folder& f) {
         f.replace("model/config.json", "\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5");
         return f.train();
       },
       2,
       {"14 missing: model.layers.4.input_layernorm.weight"}},
      {"WrongShapes",
       [](const Folder& f) {
         f.replace("model/config.json", "\"intermediate_size\": 64", "\"intermediate_size\": 72");
         return f.train();
       },
       2,
       {"12 of a wrong shape: model.layers.0.mlp.gate_proj.weight is [64, 32], expected [72, 32]"}},
      {"Pickle",
       [](const Folder& f) {
         fs::rename(f.at("model/model.safetensors"), f.at("model/pytorch_model.bin"));
         return f.train();
       },
       2,
       {"only PyTorch pickle files (pytorch_model.bin)", "Convert them once"}},
      {"Quantized",
       [](const Folder& f) {
         f.write(
             "model/model.safetensors",
             safetensors({{"a.weight_scale_inv",
                           {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {0, 4}}}},
                          {"a.weight",
                           {{"dtype", "F8_E4M3"}, {"shape", {12}}, {"data_offsets", {4, 16}}}}}));
         return f.train();
       },
       2,
       {"2 tensors are of a quantised checkpoint", "a.weight_scale_inv (F32)"}},
      {"BrokenTokenizer",
       [](const Folder& f) {
         f.write("model/tokenizer.json", R"({"model": {}})");
         return f.train();
       },
       2,
       {"{dir}/model/tokenizer.json.model: key 'vocab' is missing"}},
      {"NoSuchAdapter",
       [](const Folder& f) {
         return Arguments{"score",   f.at("model"),       "--adapter", f.at("none"),
                          "--input", f.at("train.jsonl"), "--output",  f.at("scored.jsonl")};
       },
       2,
       {"{dir}/none: there is no such adapter folder"}},
      {"DamagedTrainingCheckpoint",
       [](const Folder& f) {
         const pid_t first = start(f, f.train());
         EXPECT_EQ(wait_for(first), 0) << message(f);
         const std::string saved = f.at("run/checkpoints/step-00000003");
         fs::rename(saved, f.at("saved"));
         fs::remove_all(f.at("run"));
         fs::resize_file(f.at("saved/weights.safetensors"), 1000);
         return f.train({"train.resume=" + f.at("saved")});
       },
       2,
       {"{dir}/saved: weights.safetensors has 1000 bytes, expected"}},
      {"ExportOverAModel",
       [](const Folder& f) {
         return Arguments{"export", f.at("model"), "--output", f.at("model")};
       },
       2,
       {"{dir}/model exists and is not empty"}},
      {"ExportOverSomethingElse",
       [](const Folder& f) {
         fs::create_directory(f.at("notes"));
         f.write("notes/todo.txt", "mine");
         return Arguments{"export", f.at("model"), "--output", f.at("notes"), "--overwrite"};
       },
       2,
       {"{dir}/notes is not overwritten: it holds no config.json"}},
      {"ExportOverAFile",
       [](const Folder& f) {
         return Arguments{"export", f.at("model"), "--output", f.at("train.jsonl")};
       },
       2,
       {"{dir}/train.jsonl exists and is no folder"}},
  };
  return cases;
}

}  // namespace heddle::cli
