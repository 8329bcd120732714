#include "ckpt/vision_adapter.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>

#include "base/errors.h"
#include "ckpt/checked_tensor.h"
#include "ckpt/tensor_io.h"

namespace heddle::ckpt {

void add_vision_changes(ModelWriter& writer, const ModelDirectory& source,
                        const AdapterDirectory& adapter) {
  const auto stored_as = [&](const std::string& name,
                             const std::vector<std::int64_t>& shape) -> const StoredTensor& {
    const StoredTensor* found = source.find(name);
    if (found == nullptr) found = source.find(name.substr(std::string("model.").size()));
    if (found != nullptr && found->shape == shape) return *found;
    throw_error<ModelError>(
        "{}: the adapter changes '{}' [{}], which {} {}", adapter.path().string(), name,
        fmt::join(shape, ", "), source.path().string(),
        found == nullptr ? "does not hold"
                         : fmt::format("holds as [{}]", fmt::join(found->shape, ", ")));
  };
  for (const LoraPair& pair : adapter.vision_pairs()) {
    const StoredTensor& stored =
        stored_as(pair.module + ".weight", {pair.b.shape[0], pair.a.shape[1]});
    writer.add(stored.name, stored.shape, to_scalar_type(stored.dtype).value(), [&stored, pair] {
      const at::Tensor delta =
          at::mm(read_finite_tensor(pair.b, at::kDouble), read_finite_tensor(pair.a, at::kDouble)) *
          pair.scaling;
      const at::Tensor changed = read_tensor(stored, at::kDouble) + delta;
      require_unchanged({stored});
      return changed;
    });
  }
  for (const SavedParameter& saved : adapter.vision_saved()) {
    const StoredTensor& stored = stored_as(saved.name, saved.tensor.shape);
    writer.add(stored.name, stored.shape, to_scalar_type(stored.dtype).value(),
               [tensor = saved.tensor] { return read_finite_tensor(tensor); });
  }
}

}  // namespace heddle::ckpt
