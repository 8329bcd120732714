#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "rollout/engine.h"

namespace heddle::testing {

struct Answers {
  std::map<rollout::RequestId, rollout::Completion> completions;
  std::int64_t recorded = 0, launched = 0;  ///< Steps that draw.
};

/// Answers to all requests of an engine.
inline Answers answers_of(rollout::Engine& engine) {
  Answers answers;
  while (!engine.is_idle()) {
    for (rollout::Progress& progress : engine.step()) {
      if (progress.completion) answers.completions[progress.id] = std::move(*progress.completion);
    }
    if (engine.last_pass().draws)
      ++(engine.last_pass().recorded ? answers.recorded : answers.launched);
  }
  return answers;
}

}  // namespace heddle::testing
