#include "assembly/same_weights.h"

#include <algorithm>

#include "base/file_hash.h"
#include "base/hash.h"
#include "base/text.h"

namespace heddle::assembly {
namespace {

// Training changes every tensor, so the beginnings of some tell two checkpoints apart; all bytes
// would be read once more than the run needs.
constexpr std::size_t kSampledTensors = 64, kSampledBytes = 4096;

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

std::vector<comm::Fact> facts_of(const ckpt::ModelDirectory& model) {
  std::vector<const ckpt::StoredTensor*> tensors;
  for (const ckpt::StoredTensor& tensor : model.tensors()) tensors.push_back(&tensor);
  const std::string where = model.path().string();
  return {comm::content_fact("config.json of the model",
                             hash::Hasher().add(model.config().dump()).hex(), where),
          comm::content_fact("the set of weights", hash_of(tensors), where)};
}

std::vector<comm::Fact> facts_of(const ckpt::AdapterDirectory& adapter) {
  std::vector<const ckpt::StoredTensor*> tensors;
  for (const ckpt::LoraPair& pair : adapter.pairs()) {
    tensors.push_back(&pair.a);
    tensors.push_back(&pair.b);
  }
  for (const ckpt::SavedParameter& saved : adapter.saved()) tensors.push_back(&saved.tensor);
  const std::string where = adapter.path().string();
  return {comm::content_fact("adapter_config.json",
                             hash::of_file(adapter.path() / "adapter_config.json"), where),
          comm::content_fact("the set of weights of the adapter", hash_of(tensors), where)};
}

}  // namespace heddle::assembly
