#pragma once

#include <cstdint>
#include <vector>

#include "objective/loss_rows.h"
#include "objective/objective.h"

namespace heddle::objective {

/// A loss of the two texts of each row: the one that was chosen, then the one that was rejected. A
/// row lies in one micro-batch, of which the ranks along tp and cp bring together what they know of
/// its texts: two numbers of each pair are all that the loss takes. Divided by the pairs.
class PairObjective : public Objective {
 public:
  using Objective::Objective;
  double weight(const data::Batch& local) const override;

 protected:
  /// Ranks along cp know the whole loss of a micro-batch: one reports it.
  bool reports() const;
};

/// Pairs of a whole micro-batch: sequences 2i and 2i + 1 are the chosen and the rejected text.
/// Throws InternalError if the batch holds others.
std::size_t count_pairs(const data::Batch& whole);

/// Dtype of sums over a sequence's tokens: float64, but on NPUs, which have none.
c10::ScalarType sum_dtype(const runtime::Context& context);

/// Sums over the tokens of each real sequence of a whole micro-batch, on the device: the host does
/// not wait for it.
class SequenceSums {
 public:
  /// The tokens `rows` are those that this rank takes to the head; `sequences`: S.
  SequenceSums(const runtime::Context& context, const LocalBatch& batch, const LossRows& rows,
               std::int64_t sequences);

  /// [S] sums of loss weight x value over the tokens of all ranks along tp and cp, which call it
  /// together; `values` [n] belong to rows.tokens.
  at::Tensor of(const at::Tensor& values) const;
  /// [n] derivatives by the values, from those [S] by the sums.
  at::Tensor gradient(const at::Tensor& d_sums) const;

 private:
  comm::Group group_;
  at::Tensor weights_;  ///< [S,n]: the loss weight of a token in its sequence, 0 elsewhere.
};

/// Brings together numbers of a micro-batch's real sequences [S] of which ranks along `dims` have a
/// part each.
void sum_over_ranks(const comm::Mesh& mesh, const std::vector<comm::Dim>& dims,
                    std::vector<double>& of_sequences);

}  // namespace heddle::objective
