#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/run_config.h"
#include "data/tokenizer/tokenizer.h"
#include "rl/group.h"
#include "rl/judge.h"
#include "rl/prompts.h"
#include "rollout/request.h"

/// Turns of a trajectory. Its tokens are only ever appended to: the prompt of a turn is all that
/// stood there before, so that what was drawn is trained as it was drawn. A chat template that
/// renders the history anew may break that (Qwen3.5's drops earlier reasoning): then the trajectory
/// forks, and the turns from there on follow a prompt of their own.
namespace heddle::rl {

/// Appends what the policy drew in a turn. Pinned adapters have one version for all its tokens,
/// `version` from 0 on.
void add_turn(Trajectory& trajectory, rollout::Completion turn, bool is_own_distribution,
              std::int64_t version = -1);

/// Tokens at most.
struct Limits {
  std::int64_t tokens;   ///< For all turns and observations together.
  std::int64_t context;  ///< For a turn and all that it follows.
};
Limits limits_of(const config::RunConfig& config);

/// Appends what the judge answered to the turn; `prompt` is the group's. False, and nothing
/// appended, where that leaves no room for a token of the next turn: the trajectory is truncated
/// then.
bool add_observation(Trajectory& trajectory, const std::vector<std::int32_t>& prompt,
                     std::string text, const data::Tokenizer& tokenizer, const Limits& limits);

/// Does the same with the whole conversation up to the next turn, `history`, which was rendered
/// anew. If its text begins with that of all tokens before, what it adds is appended; else the
/// trajectory forks. `text`: the answer alone, for people.
bool add_history(Trajectory& trajectory, const std::vector<std::int32_t>& prompt,
                 std::vector<std::int32_t> history, std::string text,
                 const data::Tokenizer& tokenizer, const Limits& limits);

/// Takes the verdict, without an error, on the last turn of a group's trajectory. True if it goes
/// on with another turn. Throws DataError for a conversation that cannot be rendered.
bool take_verdict(Group& group, const Verdict& verdict, const Prompts& prompts,
                  const data::Tokenizer& tokenizer, const Limits& limits);

/// A row of training: a prompt, and the tokens [first, last) of a trajectory that follow it.
struct Strand {
  const std::vector<std::int32_t>* prompt;
  std::int64_t first, last;
  const std::vector<std::uint16_t>* experts;
};

/// One, and one more for each fork; they point into the trajectory and to the group's prompt.
std::vector<Strand> strands_of(const Trajectory& trajectory,
                               const std::vector<std::int32_t>& prompt);

/// Tokens that the next turn follows.
std::vector<std::int32_t> context_of(const Trajectory& trajectory,
                                     const std::vector<std::int32_t>& prompt);

}  // namespace heddle::rl
