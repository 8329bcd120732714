#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "data/batch.h"
#include "models/model.h"

namespace heddle::objective {

using models::Model;

/// The rows of a micro-batch that a language model's loss is made of, on the model's device, and
/// how the ranks along tp divide them: each takes a run of ceil(n / tp) of all n to the head, the
/// last ones less or none, as prompts without labels may fill the rows of one rank.
struct LossRows {
  LossRows() = default;
  /// Takes the rows of `batch`, which is on the host, that have a label and a weight; `multiple`:
  /// their number is rounded up to one by rows of weight 0 (but to no more than all rows), for
  /// launches that serve several batches. Gradients are those of gradient_scale * loss_sum.
  LossRows(const Model& model, const data::Batch& batch, double gradient_scale,
           std::int64_t multiple = 1);

  std::int64_t total = 0;  ///< n, of all ranks along tp.
  at::Tensor index;        ///< int64 into this rank's rows [T/tp]; undefined: every row.
  std::vector<std::int64_t> sent, received;  ///< [tp], of the indexed rows; empty: none moves.
  // This rank's run:
  std::vector<std::int64_t> tokens;           ///< Where they are in the batch [T].
  at::Tensor labels;                          ///< int64
  at::Tensor loss_weights, gradient_weights;  ///< fp32 or wider
};

/// Normalised hidden states [n,H] of this rank's run of rows, from those [T/tp,H] of all its
/// tokens; differentiable.
at::Tensor normalized_rows(Model& model, const at::Tensor& hidden, const LossRows& rows);

}  // namespace heddle::objective
