#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "comm/group.h"
#include "objective/local_batch.h"
#include "objective/loss_rows.h"
#include "runtime/context.h"

namespace heddle::objective {

/// Dtype of sums over a sequence's tokens: float64, but on NPUs, which have none.
c10::ScalarType sum_dtype(const runtime::Context& context);

/// Sums over the tokens of each of S sequences, on the device: the host does not wait for them. The
/// ranks of `group` have tokens of the same sequences and call together.
class SequenceSums {
 public:
  /// `sequence` [n] int64: where each of this rank's tokens belongs; `weights` [n]: its factor in
  /// the sums, of their dtype.
  SequenceSums(comm::Group group, const at::Tensor& sequence, const at::Tensor& weights,
               std::int64_t sequences);

  /// [S] sums of weight x value over the tokens of all ranks; `values` [n].
  at::Tensor of(const at::Tensor& values) const;
  /// [n] derivatives by the values, from those [S] by the sums.
  at::Tensor gradient(const at::Tensor& d_sums) const;
  /// [S] largest value over the tokens of all ranks with a weight, -infinity without one.
  at::Tensor largest(const at::Tensor& values) const;
  /// [n]: of each token's sequence, its entry of [S].
  at::Tensor at_tokens(const at::Tensor& of_sequences) const;

 private:
  comm::Group group_;
  at::Tensor sequence_;
  at::Tensor weights_;  ///< [S,n]: the weight of a token in its sequence, 0 elsewhere.
};

/// The numbers [n] of the sequences in the whole micro-batch that the tokens `rows` are of.
at::Tensor sequence_of_rows(const runtime::Context& context, const LocalBatch& batch,
                            const LossRows& rows);
/// Sums, weighted by the loss weights, over the real sequences of a whole micro-batch, of which the
/// ranks along tp and cp have parts; the tokens `rows` are those that this rank takes to the head.
SequenceSums sums_of_rows(const runtime::Context& context, const LocalBatch& batch,
                          const LossRows& rows, std::int64_t sequences);

}  // namespace heddle::objective
