#include "ckpt/checked_tensor.h"

#include <ATen/ops/isfinite.h>

#include "base/errors.h"
#include "ckpt/tensor_io.h"

namespace heddle::ckpt {

at::Tensor read_finite_tensor(const StoredTensor& source, std::optional<at::ScalarType> dtype) {
  at::Tensor tensor = dtype ? read_tensor(source, *dtype) : read_tensor(source);
  if (at::isfinite(tensor).all().item<bool>()) return tensor;
  throw_error<ModelError>(
      "{} holds NaN or infinity: the file is damaged, or the training that wrote it had diverged",
      source.where());
}

void require_unchanged(const std::vector<StoredTensor>& tensors) {
  const files::MappedFile* last = nullptr;  // tensors of a file stand together
  for (const StoredTensor& tensor : tensors) {
    if (tensor.map.get() != last && tensor.map) tensor.map->require_unchanged();
    last = tensor.map.get();
  }
}

}  // namespace heddle::ckpt
