#pragma once

#include "serve/tinker/promises.h"
#include "tenants/trainer.h"

namespace heddle::serve::tinker {

/// The answer to a forward_backward: log-probabilities, losses and metrics of its datums.
Outcome outcome_of(const tenants::Work& work, const tenants::WorkResult& result);
/// The answer to an optim_step.
Outcome outcome_of(const tenants::StepResult& result);

}  // namespace heddle::serve::tinker
