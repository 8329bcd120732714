#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace heddle::objective {

/// Baseline of a trajectory's reward; mean and std are of its group.
enum class Advantage {
  kGrpo,               ///< (R - mean) / (std + 1e-6), std of n - 1 (arXiv 2402.03300)
  kDrGrpo,             ///< R - mean (arXiv 2503.20783)
  kRloo,               ///< R - mean of the others = n / (n - 1) (R - mean) (arXiv 2402.14740)
  kReinforcePlusPlus,  ///< Returns of each token, whitened over the batch (arXiv 2501.03262)
  kReinforcePlusPlusBaseline,  ///< R - mean, whitened over the batch
  kOpo,                        ///< R - sum(length R) / sum(length) (arXiv 2505.23585)
};

/// Advantages [n] of one group from its rewards [n]; of kReinforcePlusPlus the rewards themselves,
/// of kReinforcePlusPlusBaseline before whitening. `lengths` [n]: tokens of each, for kOpo. A group
/// of one has R / (1 + 1e-6) with kGrpo, and its reward with kRloo.
std::vector<double> group_advantages(Advantage kind, std::span<const double> rewards,
                                     std::span<const std::int64_t> lengths);

/// R_t = r_t + gamma R_{t+1} over the tokens of one sequence with a mask; others are passed over
/// and get 0.
std::vector<double> discounted_returns(std::span<const double> rewards, std::span<const float> mask,
                                       double gamma);

/// (x - mean) / sqrt(var + 1e-8), var of n - 1, of all values, each counted `counts` times: those
/// of a whole batch. A single value keeps its deviation 0.
void whiten(std::span<double> values, std::span<const double> counts);

}  // namespace heddle::objective
