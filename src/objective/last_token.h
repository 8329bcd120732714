#pragma once

#include "objective/local_batch.h"

namespace heddle::objective {

/// Hidden states of the last tokens of the real sequences that end in this rank's part of a batch
/// (batch.last_tokens), from the rows of the ranks along tp. [S,H] on each of them, differentiable.
at::Tensor last_token_rows(const Model& model, const at::Tensor& hidden, const data::Batch& batch);

}  // namespace heddle::objective
