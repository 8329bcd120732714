#include "train/same_inputs.h"

#include <algorithm>
#include <utility>

#include "base/file_hash.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/text.h"
#include "config/shared_entries.h"

namespace heddle::train {
namespace {

// Training changes every tensor, so the beginnings of some tell two checkpoints apart; all bytes
// would be read once more than the run needs.
constexpr std::size_t kSampledTensors = 64, kSampledBytes = 4096;

// Of 32 digits; enough to see that two differ.
constexpr std::size_t kShownDigits = 8;

comm::Fact content(std::string name, std::string hash, const std::string& where) {
  std::string shown = fmt::format("{} (content {})", where, hash.substr(0, kShownDigits));
  return {std::move(name), std::move(hash), std::move(shown)};
}

std::string hash_of(const std::vector<const ckpt::StoredTensor*>& tensors) {
  hash::Hasher hasher;
  const std::size_t every = std::max<std::size_t>(1, tensors.size() / kSampledTensors);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const ckpt::StoredTensor& tensor = *tensors[i];
    hasher.add(fmt::format("{} {} {}", tensor.name, static_cast<int>(tensor.dtype),
                           fmt::join(tensor.shape, ",")));
    if (i % every != 0) continue;
    const auto bytes = tensor.data.first(std::min(kSampledBytes, tensor.data.size()));
    hasher.add({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  return hasher.hex();
}

}  // namespace

std::vector<comm::Fact> settings_of(const std::string& command, const config::RunConfig& config) {
  std::vector<comm::Fact> facts = {{"the command", command}};
  for (auto& [key, value] : config::shared_entries(config)) facts.push_back({key, value});
  return facts;
}

std::vector<comm::Fact> facts_of(const ckpt::ModelDirectory& model) {
  std::vector<const ckpt::StoredTensor*> tensors;
  for (const ckpt::StoredTensor& tensor : model.tensors()) tensors.push_back(&tensor);
  return {content("config.json of the model", hash::Hasher().add(model.config().dump()).hex(),
                  model.path().string()),
          content("the set of weights", hash_of(tensors), model.path().string())};
}

std::vector<comm::Fact> facts_of(const ckpt::AdapterDirectory& adapter) {
  std::vector<const ckpt::StoredTensor*> tensors;
  for (const ckpt::LoraPair& pair : adapter.pairs()) {
    tensors.push_back(&pair.a);
    tensors.push_back(&pair.b);
  }
  for (const ckpt::SavedParameter& saved : adapter.saved()) tensors.push_back(&saved.tensor);
  return {content("adapter_config.json", hash::of_file(adapter.path() / "adapter_config.json"),
                  adapter.path().string()),
          content("the set of weights of the adapter", hash_of(tensors), adapter.path().string())};
}

std::vector<comm::Fact> facts_of(const std::string& key, const data::Dataset& data) {
  std::vector<std::string> files;
  for (const data::Dataset::File& file : data.files())
    files.push_back(fmt::format("{} with {} rows", file.path, file.rows));
  return {content(key, data.key(), text::list_some(files))};
}

}  // namespace heddle::train
