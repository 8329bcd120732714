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
  /// With accuracy and macro-F1 over the classes that occur; of regression the loss alone.
  Evaluation evaluate(const std::shared_ptr<const data::Dataset>& rows,
                      const data::EvaluationLoader::Options& loader_options) override;
};

}  // namespace heddle::objective
