#pragma once

#include <memory>
#include <vector>

#include "objective/objective.h"
#include "objective/policy_loss.h"

namespace heddle::objective {

/// Facts about a row's tokens before the policy runs on it, [n] each; entry t belongs to the
/// label of token t. Empty columns as in PolicyTokens.
struct PolicyRow {
  std::vector<double> old, behaviour, reference, advantages;
  /// Tokens that each was drawn from, the policy's distribution being over these; empty: all.
  std::vector<std::vector<std::int32_t>> supports = {};
};

/// Policy gradients on rows that a policy generated; Batch::row_ids name their PolicyRow, and
/// tokens that it chose have a label and a loss weight. The ranks along tp and cp bring together
/// the log-probabilities of a micro-batch, so that a loss may span a sequence; it is computed on
/// the host in double. Divided as PolicyOptions::mean says.
class Policy : public Objective {
 public:
  Policy(const assembly::ModelOnRanks& placed, const PolicyOptions& options)
      : Objective(placed), options_(options) {}

  double divisor(const data::Step& step) const override;
  double weight(const data::Batch& local) const override { return local.loss_weight_sum; }
  std::vector<HeadFunction> heads(std::span<const data::Batch> micro_batches,
                                  const PassOptions& options) override;

  /// Rows of the next steps, until others are set.
  void set_rows(std::vector<PolicyRow> rows) { rows_ = std::move(rows); }
  /// Statistics of all ranks since the last call; called by all ranks.
  PolicyStatistics take_statistics();

 private:
  /// Columns [T] of a whole micro-batch.
  struct Columns {
    std::vector<double> old, behaviour, reference, advantages;
    std::vector<std::vector<std::int32_t>> supports;
  };
  Columns columns_of(const data::Batch& whole) const;
  HeadResult run(const at::Tensor& hidden, const LocalBatch& batch, const data::Batch& whole,
                 const Columns& columns, const PassOptions& options);

  PolicyOptions options_;
  std::vector<PolicyRow> rows_;
  PolicyStatistics statistics_;  ///< For this rank.
};

}  // namespace heddle::objective
