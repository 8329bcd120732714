#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

#include "ckpt/companions.h"
#include "ckpt/safetensors.h"

namespace heddle::ckpt {

/// A Hugging Face model directory: config.json and the weights, in one model.safetensors or in
/// shards with model.safetensors.index.json. Opening reads headers only.
class ModelDirectory {
 public:
  /// Throws ModelError that lists what is wrong: no weights, PyTorch pickles only, a missing shard,
  /// tensors that are in the index and not in their shard (or the reverse), a tensor in two shards,
  /// quantised weights.
  static ModelDirectory open(const Path& path);

  const Path& path() const { return path_; }
  const nlohmann::ordered_json& config() const { return config_; }
  /// generation_config.json; null when there is none.
  const nlohmann::ordered_json& generation_config() const { return generation_config_; }

  /// Every tensor, file after file, in the order of the data.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  /// nullptr if there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  /// Throws ModelError that names the nearest name there is.
  const StoredTensor& at(std::string_view name) const;
  /// Bytes of all tensors.
  std::uint64_t bytes() const;
  const std::vector<Path>& weight_files() const { return weight_files_; }
  /// Files beside weights, configuration and tokenizer, as they were when it was opened.
  const std::vector<Companion>& companions() const { return companions_; }

 private:
  ModelDirectory() = default;
  void read_headers();

  Path path_;
  nlohmann::ordered_json config_;
  nlohmann::ordered_json generation_config_;
  std::vector<Path> weight_files_;
  std::vector<Companion> companions_;
  std::vector<StoredTensor> tensors_;
  std::unordered_map<std::string, std::size_t> index_;
};

/// Parses a JSON file of a model's folder, which must hold an object. Throws FileError, or
/// ModelError with file, line and column.
nlohmann::ordered_json read_json_object(const Path& path);

}  // namespace heddle::ckpt
