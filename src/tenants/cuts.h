#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "data/batch.h"
#include "tenants/trainer.h"

namespace heddle::tenants {

/// Consecutive data of one work that run in one pass, and where their results go.
struct Cut {
  const Work* work;
  std::span<const Datum> data;
  std::span<DatumOutput> outputs;
  WorkResult* result;
  std::int64_t tokens;
  std::int64_t rows;  ///< Rows of the head: one for each target.
  /// A pass's memory follows the larger of both.
  std::int64_t cost() const { return std::max(tokens, rows); }
};

/// A work's own cut: what others bring does not change it.
std::vector<Cut> cuts_of(const Work& work, WorkResult& result, std::int64_t pass_tokens);

/// Puts the cuts into passes of about `pass_tokens`: those of a set in their order and none of them
/// in one pass, as the order of its sums would depend on the pass.
std::vector<std::vector<Cut>> passes_of(const std::vector<Cut>& cuts, std::int64_t pass_tokens);

/// Every position has a label: outputs are wanted of all.
data::Batch batch_of(std::span<const Datum> data);

/// Targets of the cuts of one pass, in their order.
struct Targets {
  std::vector<std::int64_t> positions;  ///< Position of each among all tokens of the cuts.
  std::vector<std::int64_t> tokens;
};
/// None where every token has one target.
std::optional<Targets> soft_targets_of(std::span<const Cut> cuts);

/// Losses of the cuts of one pass.
struct CutLosses {
  std::vector<double> sums;        ///< One a cut.
  std::vector<double> d_logprobs;  ///< Derivatives of them, by row of the cuts in their order.
};

/// From log-probabilities of all rows of the cuts, in their order. Leaves outputs where they go.
CutLosses losses_of(std::span<const Cut> cuts, std::span<const double> logprobs);

/// CutLosses::d_logprobs where no log-probability changes them; none if one of the cuts has another
/// loss.
std::optional<std::vector<double>> constant_derivatives(std::span<const Cut> cuts);

}  // namespace heddle::tenants
