#pragma once

#include "objective/pair_loss.h"
#include "objective/pairs.h"
#include "objective/reference_policy.h"

namespace heddle::objective {

/// Preference tuning: the chosen of two answers to a prompt is to become more likely than the
/// rejected one, measured from a reference policy (DPO) or by itself (ORPO, SimPO), when no
/// reference is computed.
class Preference : public PairObjective {
 public:
  Preference(const assembly::ModelOnRanks& placed, const DpoOptions& options,
             const ReferenceOptions& reference)
      : PairObjective(placed), options_(options), reference_(placed, reference) {}

  std::vector<const Metric*> metrics() const override {
    return {&metric::kRewardMargin, &metric::kRewardAccuracy, &metric::kLogpsChosen,
            &metric::kLogpsRejected};
  }
  void prepare(const RunRows& rows) override {
    if (compares_with_reference(options_.loss)) reference_.prepare(rows);
  }
  std::vector<HeadFunction> heads(std::span<const data::Batch> micro_batches,
                                  const PassOptions& options) override;

 private:
  /// Numbers [S] of a micro-batch's real sequences that are known before the policy runs on it.
  struct Known {
    /// Log-probabilities; undefined without the last stage, and for a loss without a reference.
    at::Tensor reference;
    std::vector<double> tokens;  ///< Sums of loss weights.
  };
  HeadResult run(const at::Tensor& hidden, const LocalBatch& batch, const Known& known,
                 const PassOptions& options) const;

  DpoOptions options_;
  ReferencePolicy reference_;
};

}  // namespace heddle::objective
