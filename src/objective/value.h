#pragma once

#include <vector>

#include "objective/objective.h"

namespace heddle::objective {

/// Facts about a row's tokens that its values learn from, [n] each; entry t belongs to the label of
/// token t.
struct ValueRow {
  std::vector<double> old, returns;  ///< See value_loss().
};

/// A critic: a classification head of one number, at each token with a label and a loss weight the
/// return that is to be expected before the label is drawn. Batch::row_ids name their ValueRow.
class Value : public Objective {
 public:
  /// `clip`: see value_loss().
  Value(const assembly::ModelOnRanks& placed, double clip) : Objective(placed), clip_(clip) {}

  std::vector<const Metric*> metrics() const override { return {&metric::kValueClipped}; }
  /// Tokens of a step.
  double divisor(const data::Step& step) const override;
  double weight(const data::Batch& local) const override { return local.loss_weight_sum; }
  std::vector<HeadFunction> heads(std::span<const data::Batch> micro_batches,
                                  const PassOptions& options) override;

  /// Rows of the next steps, until others are set.
  void set_rows(std::vector<ValueRow> rows) { rows_ = std::move(rows); }
  /// [T] of a micro-batch on the host, in double: values of the tokens that this rank alone tells,
  /// 0 elsewhere and in other tokens. Without gradients; called by all ranks.
  at::Tensor values(const data::Batch& whole) const;

 private:
  struct Columns {
    std::vector<double> old, returns;  ///< [T]
  };
  Columns columns_of(const data::Batch& whole) const;
  HeadResult run(const at::Tensor& hidden, const LocalBatch& batch, const Columns& columns,
                 const PassOptions& options) const;

  double clip_;
  std::vector<ValueRow> rows_;
};

}  // namespace heddle::objective
