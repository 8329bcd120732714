#pragma once

#include "objective/objective.h"

namespace heddle::objective {

/// Class or number of a whole sequence, from its last token: cross-entropy, with one label squared
/// error. Divided by the sequences.
class Classification : public Objective {
 public:
  using Objective::Objective;
  double weight(const data::Batch& local) const override {
    return static_cast<double>(local.real_sequences);
  }
  std::vector<HeadFunction> heads(std::span<const data::Batch> micro_batches,
                                  const PassOptions& options) override;
};

}  // namespace heddle::objective
