#pragma once

#include "objective/pairs.h"

namespace heddle::objective {

/// A reward model: a classification head with one label, whose score of the chosen text is to be
/// above that of the rejected one.
class Reward : public PairObjective {
 public:
  using PairObjective::PairObjective;
  std::vector<const Metric*> metrics() const override {
    return {&metric::kAccuracy, &metric::kMargin};
  }
  std::vector<HeadFunction> heads(std::span<const data::Batch> micro_batches,
                                  const PassOptions& options) override;

 private:
  HeadResult run(const at::Tensor& hidden, const LocalBatch& batch, std::int64_t pairs,
                 const PassOptions& options) const;
};

}  // namespace heddle::objective
