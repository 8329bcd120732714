#pragma once

#include "config/run_config.h"

namespace heddle::config {

/// Requirements of an objective on the rest of a configuration.
struct ObjectiveNeeds {
  models::Head head;
  std::int64_t texts;  ///< Sequences of a usual row.
};
ObjectiveNeeds needs_of(Objective objective);

/// train.objective; kAuto as model.head says.
Objective objective_of(const RunConfig& config);

}  // namespace heddle::config
