#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "assembly/model_on_ranks.h"

namespace heddle::rollout {

/// Experts that a token chooses in all layers together; 0 for a model without.
std::int64_t expert_width(const models::Config& config);

/// The experts that the tokens of a pass chose, on all ranks: [sum of rows, expert_width] of float,
/// the rows of one data rank after those of another. `experts` are this rank's, by layer, see
/// Pipeline::evaluate; `rows` those of each data rank. Called by all ranks.
at::Tensor expert_table(const assembly::ModelOnRanks& placed,
                        const std::vector<at::Tensor>& experts,
                        const std::vector<std::int64_t>& rows);

}  // namespace heddle::rollout
