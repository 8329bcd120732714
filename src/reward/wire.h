#pragma once

#include <optional>
#include <string>

#include "reward/reward.h"

/// The objects that programs and servers of the user read and write (docs/rewards.md).
namespace heddle::reward {

/// {"group", "prompt", "completion", "message"?, "tokens"?, "turns"?, "truth", "meta"}; who sends
/// it adds "id".
Json to_wire(const Sample& sample);
/// {"op": "reset", "seed", "row"}, {"op": "step", "action", "message"?, "tokens"?, "truncated"} or
/// {"op": "close"}; who sends it adds "id" and "episode".
Json episode_to_wire(const Sample& sample);

/// Whether it is a number that a reward may be: finite, and 1e9 at most.
bool is_reward(const Json& value);

/// From {"reward", "parts"?, "observation" or "messages"?, "error"?}, where the reward may be
/// missing with an observation or messages; an error in the score for anything else, for what
/// is_reward() refuses, and for more than 256 parts or names that no metric can have.
Score from_wire(const Json& answer);
/// From an environment's answer. kOpening: {"observation" or "messages"?}, the prompt. kScore: as
/// above with "done" and "truncated"?; what it answers goes on unless it is done.
Score episode_from_wire(const Json& answer, Ask ask);

/// The JSON text of a value; bytes that are not UTF-8, which a model may print, become U+FFFD.
std::string wire_text(const Json& value);

/// `failed` instead of an error where it is set.
Score or_failed(Score score, const std::optional<double>& failed);

}  // namespace heddle::reward
