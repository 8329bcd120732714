#pragma once

#include "base/named_enum.h"

namespace heddle::objective {

/// Baseline of a trajectory's reward; mean and std are of its group.
enum class Advantage {
  kGrpo,               ///< (R - mean) / (std + 1e-6), std of n - 1 (arXiv 2402.03300)
  kDrGrpo,             ///< R - mean (arXiv 2503.20783)
  kRloo,               ///< R - mean of the others = n / (n - 1) (R - mean) (arXiv 2402.14740)
  kReinforcePlusPlus,  ///< Returns of each token, whitened over the batch (arXiv 2501.03262)
  kReinforcePlusPlusBaseline,  ///< R - mean, whitened over the batch
  kOpo,                        ///< R - sum(length R) / sum(length) (arXiv 2505.23585)
  kGae,  ///< Each token against a critic's values (arXiv 1506.02438), whitened over the batch
};
constexpr auto names_of(Advantage) {
  return spelled("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "opo", "gae");
}

}  // namespace heddle::objective
