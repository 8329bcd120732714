#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ckpt/safetensors.h"

namespace heddle::ckpt {

/// Runs read_tensor() for weights that are few enough to be looked at: throws ModelError that names
/// the tensor if a number in it is NaN or infinite, or becomes so in `dtype`.
at::Tensor read_finite_tensor(const StoredTensor& source, std::optional<at::ScalarType> dtype = {});

/// Throws UserError that names the file of a tensor that was written to or cut since it was opened:
/// what was read may be a mixture of two.
void require_unchanged(const std::vector<StoredTensor>& tensors);

}  // namespace heddle::ckpt
