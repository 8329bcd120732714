#pragma once

#include "objective/local_batch.h"

namespace heddle::objective {

/// Hidden states of `tokens` of this rank's part of a batch, from the rows of the ranks along tp,
/// which name the same ones. [n,H] on each of them, differentiable.
at::Tensor rows_of_tokens(const Model& model, const at::Tensor& hidden, const data::Batch& batch,
                          const std::vector<std::int64_t>& tokens);

/// rows_of_tokens() of the last tokens of the real sequences that end in this rank's part of a
/// batch (batch.last_tokens): [S,H].
at::Tensor last_token_rows(const Model& model, const at::Tensor& hidden, const data::Batch& batch);

}  // namespace heddle::objective
