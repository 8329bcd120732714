// Program that the interop checks call:
//   rewrite model IN OUT MAX_SHARD_BYTES     reads every tensor and writes a new directory, half of
//   them carried through rewrite adapter IN OUT text|nested|bare|bare-nested|same rewrite scalings
//   IN                      "module[.parameter] rank scaling" of every pair
#include <cstdio>
#include <exception>
#include <string>

#include "base/errors.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/model_writer.h"

namespace {

using namespace heddle;
using namespace heddle::ckpt;

void rewrite_model(const Path& in, const Path& out, std::uint64_t max_shard_bytes) {
  const auto model = ModelDirectory::open(in);
  ModelWriter writer(out, {.max_shard_bytes = max_shard_bytes});
  bool is_carried = false;
  for (const StoredTensor& tensor : model.tensors()) {
    if (is_carried) {
      writer.carry(tensor);
    } else {
      const at::ScalarType type = *to_scalar_type(tensor.dtype);
      writer.add(tensor.name, tensor.shape, type,
                 [&tensor, type] { return read_tensor(tensor, type); });
    }
    is_carried = !is_carried;
  }
  writer.set_config(model.config());
  writer.copy_companions_from(in);
  writer.commit();
}

AdapterSpelling parse_spelling(const std::string& name) {
  if (name == "text") return AdapterSpelling::kText;
  if (name == "nested") return AdapterSpelling::kNested;
  if (name == "bare") return AdapterSpelling::kBare;
  if (name == "bare-nested") return AdapterSpelling::kBareNested;
  throw_error<UserError>("no such spelling: {}", name);
}

void rewrite_adapter(const Path& in, const Path& out, const std::string& spelling) {
  const auto adapter = AdapterDirectory::open(in);
  AdapterTensors tensors;
  for (const LoraPair& pair : adapter.pairs()) {
    tensors.pairs.push_back(
        {pair.module, pair.parameter, read_tensor(pair.a), read_tensor(pair.b)});
  }
  for (const SavedParameter& saved : adapter.saved()) {
    tensors.saved.push_back({saved.name, read_tensor(saved.tensor)});
  }
  write_adapter(out, adapter.config(), tensors,
                spelling == "same" ? adapter.spelling() : parse_spelling(spelling));
}

void print_scalings(const Path& in) {
  const auto adapter = AdapterDirectory::open(in);
  for (const LoraPair& pair : adapter.pairs()) {
    std::printf("%s%s%s %lld %.17g\n", pair.module.c_str(), pair.parameter.empty() ? "" : ".",
                pair.parameter.c_str(), static_cast<long long>(pair.rank), pair.scaling);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.size() == 4 && words[0] == "model") {
      rewrite_model(words[1], words[2], std::stoull(words[3]));
    } else if (words.size() == 4 && words[0] == "adapter") {
      rewrite_adapter(words[1], words[2], words[3]);
    } else if (words.size() == 2 && words[0] == "scalings") {
      print_scalings(words[1]);
    } else {
      return 64;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
