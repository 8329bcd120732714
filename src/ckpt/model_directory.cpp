#include "ckpt/model_directory.h"

#include <algorithm>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "base/errors.h"
#include "base/files.h"
#include "base/json.h"
#include "base/quote.h"
#include "base/text.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/quantisation.h"
#include "ckpt/training_checkpoint.h"
#include "ckpt/weight_map.h"
#include "hub/find.h"

namespace heddle::ckpt {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

/// The distinct files of the index. Throws ModelError that lists those that are not there.
std::vector<Path> find_shards(const Path& path,
                              const std::map<std::string, std::string>& weight_map) {
  std::set<std::string> shards;
  for (const auto& [name, shard] : weight_map) shards.insert(shard);
  std::vector<std::string> missing;
  std::vector<Path> found;
  for (const std::string& shard : shards) {
    std::error_code ignored;
    if (!std::filesystem::exists(path / shard, ignored)) missing.push_back(shard);
    found.push_back(path / shard);
  }
  if (!missing.empty()) {
    throw_error<ModelError>("{}: {} of {} shards listed in {} are missing: {}", path.string(),
                            missing.size(), shards.size(), kIndexFile, text::list_some(missing));
  }
  return found;
}

void check_index(const ModelDirectory& model,
                 const std::map<std::string, std::string>& weight_map) {
  std::vector<std::string> absent, unlisted;
  for (const auto& [name, shard] : weight_map) {
    const StoredTensor* tensor = model.find(name);
    if (!tensor || tensor->file.filename() != shard) {
      absent.push_back(fmt::format("{} (expected in {})", name, shard));
    }
  }
  for (const StoredTensor& tensor : model.tensors()) {
    if (!weight_map.contains(tensor.name)) {
      unlisted.push_back(fmt::format("{} (in {})", tensor.name, tensor.file.filename().string()));
    }
  }
  std::string message;
  if (!absent.empty()) {
    message += fmt::format("; {} tensors of the index are not in their shard: {}", absent.size(),
                           text::list_some(absent));
  }
  if (!unlisted.empty()) {
    message += fmt::format("; {} tensors are in a shard and not in the index: {}", unlisted.size(),
                           text::list_some(unlisted));
  }
  if (message.empty()) return;
  throw_error<ModelError>("{}: {} does not fit the shards{}", model.path().string(), kIndexFile,
                          message);
}

[[noreturn]] void fail_without_weights(const Path& path) {
  std::vector<std::string> pickles, others, ggufs;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(path, ignored)) {
    const std::string name = entry.path().filename().string();
    const std::string extension = entry.path().extension().string();
    if (extension == ".bin" || extension == ".pt" || extension == ".pth") pickles.push_back(name);
    if (extension == ".safetensors") others.push_back(name);
    if (extension == ".gguf") ggufs.push_back(name);
  }
  std::sort(pickles.begin(), pickles.end());
  std::sort(others.begin(), others.end());
  if (std::ranges::any_of(others, [](const std::string& name) {
        return name == kPeftWeights || name == kCompactWeights;
      })) {
    throw_error<ModelError>(
        "{}: an adapter directory, not a model: give the base model, and this folder as the "
        "adapter: --adapter {}, or adapter.path={} to train it on",
        path.string(), path.string(), path.string());
  }
  if (is_training_checkpoint(path)) {
    throw_error<ModelError>(
        "{}: a training checkpoint, not a model: make one of it with `heddle export {} --output "
        "DIR`",
        path.string(), path.string());
  }
  if (const Path result = path / "final"; std::filesystem::exists(path / "config.resolved.yaml")) {
    throw_error<ModelError>(
        "{}: the folder of a run, not a model: {}", path.string(),
        std::filesystem::exists(result / "config.json") ? "its model is " + result.string()
        : std::filesystem::exists(result / "adapter_config.json")
            ? fmt::format("it trained an adapter: give the base model, and --adapter {0}, or "
                          "adapter.path={0} to train it on",
                          result.string())
            : "it has no final/ yet; a checkpoint of it becomes a model with `heddle export "
              "CHECKPOINT --output DIR`");
  }
  if (!ggufs.empty()) {
    throw_error<ModelError>(
        "{}: only GGUF files ({}), the format of llama.cpp: take the release of the model in "
        "safetensors",
        path.string(), text::list_some(ggufs));
  }
  if (!pickles.empty()) {
    throw_error<ModelError>(
        "{}: only PyTorch pickle files ({}), which can run code when they are read. Convert them "
        "once: "
        "python -c \"from transformers import AutoModelForCausalLM as M; "
        "M.from_pretrained('{}', dtype='auto').save_pretrained('{}-safetensors')\"",
        path.string(), text::list_some(pickles), path.string(), path.string());
  }
  throw_error<ModelError>("{}: no weights: expected {} or {}{}", path.string(), kSingleFile,
                          kIndexFile, others.empty() ? "" : "; found " + text::list_some(others));
}

}  // namespace

nlohmann::ordered_json read_json_object(const Path& path) {
  return json::read_object<ModelError>(path, files::kJsonLimit, path.parent_path());
}

ModelDirectory ModelDirectory::open(const Path& path) {
  std::error_code ignored;
  const auto exists = [&](const char* name) {
    return std::filesystem::exists(path / name, ignored);
  };
  if (!std::filesystem::is_directory(path, ignored)) {
    throw_error<ModelError>(
        "{}: {}", path.string(),
        std::filesystem::exists(path, ignored)
            ? "a model is a folder with config.json and safetensors, this is a "
              "file"
            : "there is no such folder" + hub::advice_on_model_name(path.string()));
  }
  const bool is_sharded = exists(kIndexFile);
  if (!is_sharded && !exists(kSingleFile)) fail_without_weights(path);
  if (!exists("config.json")) throw_error<ModelError>("{}: config.json is missing", path.string());

  ModelDirectory model;
  model.path_ = path;
  model.companions_ = find_companions(path, Companions::kOther);
  model.config_ = read_json_object(path / "config.json");
  if (exists("generation_config.json")) {
    model.generation_config_ = read_json_object(path / "generation_config.json");
  }
  std::map<std::string, std::string> weight_map;
  if (is_sharded) {
    weight_map = parse_weight_map(
        json::read_object<ModelError, nlohmann::json>(path / kIndexFile, files::kJsonLimit, path),
        (path / kIndexFile).string());
    const bool lists_single_file =
        std::any_of(weight_map.begin(), weight_map.end(),
                    [](const auto& entry) { return entry.second == kSingleFile; });
    if (exists(kSingleFile) && !lists_single_file) {
      throw_error<ModelError>(
          "{}: holds {} and {}, which does not list it: they may be two models: remove the one "
          "that is old",
          path.string(), kSingleFile, kIndexFile);
    }
    model.weight_files_ = find_shards(path, weight_map);
  } else {
    model.weight_files_ = {path / kSingleFile};
  }
  model.read_headers();
  if (is_sharded) check_index(model, weight_map);
  check_not_quantised(path, model.config_, model.tensors_);
  return model;
}

void ModelDirectory::read_headers() {
  std::vector<std::string> duplicates;
  for (const Path& file : weight_files_) {
    const SafetensorsFile shard(file, path_);
    for (const StoredTensor& tensor : shard.tensors()) {
      const auto [place, is_new] = index_.emplace(tensor.name, tensors_.size());
      if (is_new) {
        tensors_.push_back(tensor);
      } else {
        duplicates.push_back(fmt::format("{} ({} and {})", tensor.name,
                                         tensors_[place->second].file.filename().string(),
                                         file.filename().string()));
      }
    }
  }
  if (!duplicates.empty()) {
    throw_error<ModelError>("{}: {} tensors are in two shards: {}", path_.string(),
                            duplicates.size(), text::list_some(duplicates));
  }
}

const StoredTensor* ModelDirectory::find(std::string_view name) const {
  const auto found = index_.find(std::string(name));
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const StoredTensor& ModelDirectory::at(std::string_view name) const {
  if (const StoredTensor* tensor = find(name)) return *tensor;
  throw_missing_tensor(path_.string(), name, tensors_);
}

std::uint64_t ModelDirectory::bytes() const {
  std::uint64_t sum = 0;
  for (const StoredTensor& tensor : tensors_) sum += tensor.data.size();
  return sum;
}

}  // namespace heddle::ckpt
