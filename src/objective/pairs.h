#pragma once

#include <cstdint>
#include <vector>

#include "objective/loss_rows.h"
#include "objective/objective.h"

namespace heddle::objective {

/// A loss of the two texts of each row: the one that was chosen, then the one that was rejected. A
/// row lies in one micro-batch, of which the ranks along tp and cp bring together what they know of
/// its texts; the loss is then computed on the host, as two numbers of each pair are all it takes.
/// Divided by the pairs.
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

/// Sums [S] of weight x value over the tokens of each real sequence of the whole micro-batch that
/// this rank has taken; `values` [n] belong to rows.tokens.
std::vector<double> sequence_sums(const LocalBatch& batch, const LossRows& rows,
                                  const at::Tensor& values, std::size_t sequences);

/// Brings together numbers of a micro-batch's real sequences [S] of which ranks along `dims` have a
/// part each.
void sum_over_ranks(const comm::Mesh& mesh, const std::vector<comm::Dim>& dims,
                    std::vector<double>& of_sequences);

}  // namespace heddle::objective
