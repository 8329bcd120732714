#pragma once

#include <memory>
#include <vector>

#include "objective/loss_rows.h"
#include "objective/objective.h"
#include "objective/policy_loss.h"

namespace heddle::objective {

/// Facts about a row's tokens before the policy runs on it, [n] each; entry t belongs to the
/// label of token t. Empty columns as in PolicyTokens.
struct PolicyRow {
  std::vector<double> old, behaviour, reference, age, advantages;
  /// Tokens that each was drawn from, the policy's distribution being over these; empty: all.
  std::vector<std::vector<std::int32_t>> supports = {};
};

/// Policy gradients on rows that a policy generated; Batch::row_ids name their PolicyRow, and
/// tokens that it chose have a label and a loss weight. The loss is computed on the device, of
/// single tokens in one pass of the head, of whole sequences from log-probabilities that the ranks
/// along tp and cp bring together; the host waits for supports alone. PolicyOptions::mean divides.
class Policy : public Objective {
 public:
  Policy(const assembly::ModelOnRanks& placed, const PolicyOptions& options)
      : Objective(placed), options_(options) {}

  double divisor(const data::Step& step) const override;
  double weight(const data::Batch& local) const override { return local.loss_weight_sum; }
  std::vector<HeadFunction> heads(std::span<const data::Batch> micro_batches,
                                  const PassOptions& options) override;

  /// Rows of the next steps, until others are set, and the divisor of their importance weights.
  void set_rows(std::vector<PolicyRow> rows, double mean_weight = 1) {
    rows_ = std::move(rows);
    mean_weight_ = mean_weight;
  }
  /// Replaces PolicyOptions::entropy_coefficient for the next steps.
  void set_entropy_coefficient(double coefficient) { options_.entropy_coefficient = coefficient; }
  /// Statistics of all ranks since the last call, for which the host waits; called by all ranks.
  PolicyStatistics take_statistics();

 private:
  /// Columns [T] of a whole micro-batch, as PolicyTokens; empty ones are undefined there.
  struct Columns {
    std::vector<double> old, behaviour, reference, age, depth, advantages, sequence_tokens,
        first_advantage;
    std::vector<std::vector<std::int32_t>> supports;
  };
  Columns columns_of(const data::Batch& whole) const;
  /// Columns of the rows that this rank takes to the head.
  PolicyTokens tokens_of(const Columns& columns, const LocalBatch& batch,
                         const LossRows& rows) const;
  HeadResult run(const at::Tensor& hidden, const LocalBatch& batch, std::int64_t sequences,
                 const Columns& columns, const PassOptions& options);

  PolicyOptions options_;
  std::vector<PolicyRow> rows_;
  double mean_weight_ = 1;
  PolicySums sums_;  ///< Sums of this rank's rows; nothing where it has run no head.
  at::Tensor entropy_;
};

}  // namespace heddle::objective
