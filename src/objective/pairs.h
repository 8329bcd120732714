#pragma once

#include <cstddef>

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
  /// 0-d sum over the pairs of a micro-batch, in the type of losses. Ranks along cp know all of
  /// them: one reports them, the others 0.
  at::Tensor reported(const at::Tensor& of_pairs) const;
};

/// Pairs of a whole micro-batch: sequences 2i and 2i + 1 are the chosen and the rejected text.
/// Throws InternalError if the batch holds others.
std::size_t count_pairs(const data::Batch& whole);

}  // namespace heddle::objective
