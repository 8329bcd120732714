#pragma once

#include <cstdint>
#include <string>

#include "data/tokenizer/tokenizer.h"
#include "rl/group.h"
#include "rollout/request.h"

/// Turns of a trajectory, whose tokens are only ever appended to: the prompt of a turn is all that
/// stood there before, so that what was drawn is trained as it was drawn. A chat template that
/// rendered the history anew would break that (Qwen3.5's drops earlier reasoning).
namespace heddle::rl {

/// Appends what the policy drew in a turn. Pinned adapters have one version for all its tokens,
/// `version` from 0 on.
void add_turn(Trajectory& trajectory, rollout::Completion turn, bool is_own_distribution,
              std::int64_t version = -1);

/// Appends what the judge answered to the turn. False, and nothing appended, where that leaves no
/// room for a token of the next turn within `most` tokens: the trajectory is truncated then.
bool add_observation(Trajectory& trajectory, std::string text, const data::Tokenizer& tokenizer,
                     std::int64_t most);

}  // namespace heddle::rl
