#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "objective/advantage.h"

namespace heddle::objective {

/// Advantages [n] of one group from its rewards [n]; of kReinforcePlusPlus and kGae the rewards
/// themselves, of kReinforcePlusPlusBaseline before whitening. `lengths` [n]: tokens of each, for
/// kOpo. A group of one has R / (1 + 1e-6) with kGrpo, and its reward with kRloo.
std::vector<double> group_advantages(Advantage kind, std::span<const double> rewards,
                                     std::span<const std::int64_t> lengths);

/// R_t = r_t + gamma R_{t+1} over the tokens of one sequence with a mask; others are passed over
/// and get 0.
std::vector<double> discounted_returns(std::span<const double> rewards, std::span<const float> mask,
                                       double gamma);

struct TokenEstimates {
  std::vector<double> advantages, returns;
};
/// Generalised advantage estimation over the tokens of one sequence (arXiv 1506.02438, eq. 16):
/// delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, return A_t + V_t;
/// nothing comes after the last token. Tokens without a mask are passed over, so that V and A of
/// the next one with a mask follow, and get 0.
TokenEstimates gae(std::span<const double> rewards, std::span<const double> values,
                   std::span<const float> mask, double gamma, double lambda);

/// (x - mean) / sqrt(var + 1e-8), var of n - 1, of all values, each counted `counts` times: those
/// of a whole batch. A single value keeps its deviation 0.
void whiten(std::span<double> values, std::span<const double> counts);

}  // namespace heddle::objective
