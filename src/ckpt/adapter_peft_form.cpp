#include <algorithm>
#include <map>
#include <utility>

#include "base/files.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/staging_directory.h"

namespace heddle::ckpt {
namespace {

/// A tensor of the directory, and how often PEFT's file repeats it: the copies of A [rank, in] lie
/// one after the other, those of B [out, rank] number by number.
struct Repeated {
  const StoredTensor* tensor = nullptr;
  std::int64_t times = 1;
  bool is_b = false;

  TensorSpec spec() const {
    TensorSpec spec = *tensor;
    spec.shape[is_b ? 1 : 0] *= times;
    return spec;
  }

  at::Tensor whole() const {
    const at::Tensor one = read_tensor(*tensor);
    if (times == 1) return one;
    return is_b ? one.repeat_interleave(times, 1) : one.repeat({times, 1});
  }
};

std::map<std::string, Repeated> tensors_of(const AdapterDirectory& adapter) {
  std::map<std::string, Repeated> tensors;
  for (const auto* const pairs : {&adapter.pairs(), &adapter.vision_pairs()}) {
    for (const LoraPair& pair : *pairs) {
      const std::int64_t rows = pair.a.shape[0], columns = pair.b.shape[1],
                         whole = std::max(rows, columns);
      tensors[pair.a.name] = {&pair.a, whole / rows, false};
      tensors[pair.b.name] = {&pair.b, whole / columns, true};
    }
  }
  for (const auto* const all : {&adapter.saved(), &adapter.vision_saved()})
    for (const SavedParameter& saved : *all) tensors[saved.tensor.name] = {&saved.tensor};
  return tensors;
}

}  // namespace

std::uint64_t write_in_peft_form(const AdapterDirectory& adapter, const Path& path,
                                 bool overwrite) {
  const std::vector<Companion> companions = find_companions(adapter.path(), Companions::kAdapter);
  check_output_directory(path, overwrite, kAdapterConfig);
  const Path place = output_place(path);
  StagingDirectory staging(place, place.string() + ".tmp");
  const std::map<std::string, Repeated> tensors = tensors_of(adapter);
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back(tensor.spec());
  SafetensorsWriter writer(staging.path() / kPeftWeights, std::move(specs));
  for (const TensorSpec& spec : writer.order())
    append_tensor(writer, spec.name, tensors.at(spec.name).whole(), spec.dtype);
  const std::uint64_t bytes = writer.bytes_written();
  writer.commit();
  files::write_atomically(
      staging.path() / kAdapterConfig,
      files::read(adapter.path() / kAdapterConfig, files::kJsonLimit, adapter.path()));
  copy_files(companions, staging.path());
  AdapterDirectory::open(staging.path());  // what cannot be read back must not take the final name
  staging.commit();
  return bytes;
}

}  // namespace heddle::ckpt
