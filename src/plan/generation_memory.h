#pragma once

// Inside src/plan only: what reinforcement learning holds besides a step.

#include <cstdint>

#include "plan/step_on_ranks.h"

namespace heddle::plan {

/// Memory of a rank between steps.
struct Owned {
  double weights = 0;    ///< Bytes of its share of the policy, as they are kept,
  double adapters = 0;   ///< and of a set of adapters of it.
  double critic = 0;     ///< Bytes of a critic,
  double reference = 0;  ///< and of a frozen model that nothing is trained on: as loaded.
  double trained = 0, trained_critic = 0;  ///< Elements that it updates.
};

/// Adds critic, reference and the caches of generation to the memory of a step. `device`: bytes of
/// a device; 0: not known, caches have all that they want.
void add_generation(const StepOnRanks& layout, std::int64_t stage_rank, const Owned& owned,
                    double device, Memory& memory);

/// Memory of a rank of rl.rollout_ranks.
RolloutMemory rollout_memory(const Step& step, double device);

}  // namespace heddle::plan
