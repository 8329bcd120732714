#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "assembly/model_on_ranks.h"

namespace heddle::rollout {

/// Experts that a token chooses in all layers together; 0 for a model without.
std::int64_t expert_width(const models::Config& config);

/// Experts that the routers of this rank chose for its rows of a pass.
struct OwnExperts {
  at::Tensor chosen;                 ///< [T/tp,layers,k]; undefined: the rank has no such layer.
  std::vector<std::int64_t> layers;  ///< Numbers among the model's layers with experts.
  /// [T/tp] place of each among the rows of its data rank, of which padding is beyond the end, with
  /// cp for example; empty: the ranks of tp have them one after another.
  std::vector<std::int64_t> places = {};

  /// `experts` by layer of the model, see Pipeline::evaluate.
  static OwnExperts of(const models::Config& config, const std::vector<at::Tensor>& experts);
};

/// The experts that the tokens of a pass chose, on all ranks: [sum of rows, expert_width] of float,
/// the rows of one data rank after those of another. `rows` are those of each data rank, of which
/// `own` may have more. Called by all ranks; waits for the device.
at::Tensor expert_table(const assembly::ModelOnRanks& placed, const OwnExperts& own,
                        const std::vector<std::int64_t>& rows);

}  // namespace heddle::rollout
