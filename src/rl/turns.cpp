#include "rl/turns.h"

#include <iterator>
#include <utility>
#include <vector>

namespace heddle::rl {
namespace {

template <class T>
void append(std::vector<T>& to, std::vector<T> from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

/// Tokens of the last strand.
std::int64_t context_size(const Trajectory& trajectory, const std::vector<std::int32_t>& prompt) {
  const Strand last = strands_of(trajectory, prompt).back();
  return std::ssize(*last.prompt) + last.last - last.first;
}

/// Tokens that the policy did not draw follow the turn, if that leaves room for one of the next.
bool append_observed(Trajectory& trajectory, const std::vector<std::int32_t>& prompt,
                     std::vector<std::int32_t> tokens, std::string text, const Limits& limits) {
  const std::int64_t count = std::ssize(tokens);
  if (trajectory.is_truncated || std::ssize(trajectory.tokens) + count >= limits.tokens ||
      context_size(trajectory, prompt) + count >= limits.context) {
    trajectory.is_truncated = true;
    return false;
  }
  const auto size = trajectory.tokens.size() + tokens.size();
  trajectory.sampled.resize(trajectory.tokens.size(), 1);
  trajectory.sampled.resize(size, 0);
  // Nothing reads these of tokens that nobody drew, but each token has its place in every column.
  trajectory.logprobs.resize(size);
  trajectory.versions.resize(size, std::int64_t{trajectory.versions.back()});
  if (!trajectory.supports.empty()) {
    for (const std::int32_t token : tokens) trajectory.supports.push_back({token});
  }
  append(trajectory.tokens, std::move(tokens));
  trajectory.turns.push_back({std::exchange(trajectory.text, {}), std::move(text)});
  return true;
}

}  // namespace

void add_turn(Trajectory& trajectory, rollout::Completion turn, bool is_own_distribution,
              std::int64_t version) {
  const std::size_t count = turn.output_ids.size();
  if (version >= 0) turn.weights_versions.assign(count, version);
  for (std::size_t t = 0; t < turn.supports.size(); ++t) {
    // A support is empty where no mass was left but the most likely token's.
    if (turn.supports[t].empty()) turn.supports[t] = {turn.output_ids[t]};
  }
  append(trajectory.tokens, std::move(turn.output_ids));
  append(trajectory.logprobs,
         std::move(is_own_distribution ? turn.logprobs : turn.sampled_logprobs));
  append(trajectory.versions, std::move(turn.weights_versions));
  append(trajectory.supports, std::move(turn.supports));
  // The turn has read all that stood before it once more; what was read first stays.
  std::vector<std::uint16_t>& experts =
      trajectory.forks.empty() ? trajectory.experts : trajectory.forks.back().experts;
  if (turn.experts.size() > experts.size()) {
    experts.insert(experts.end(),
                   turn.experts.begin() + static_cast<std::ptrdiff_t>(experts.size()),
                   turn.experts.end());
  }
  if (!trajectory.sampled.empty()) trajectory.sampled.resize(trajectory.tokens.size(), 1);
  trajectory.text = std::move(turn.text);
  trajectory.is_truncated = turn.finish_reason == rollout::FinishReason::kLength;
}

bool add_observation(Trajectory& trajectory, const std::vector<std::int32_t>& prompt,
                     std::string text, const data::Tokenizer& tokenizer, const Limits& limits) {
  std::vector<std::int32_t> tokens = tokenizer.encode(text);
  return append_observed(trajectory, prompt, std::move(tokens), std::move(text), limits);
}

bool add_history(Trajectory& trajectory, const std::vector<std::int32_t>& prompt,
                 std::vector<std::int32_t> history, std::string text,
                 const data::Tokenizer& tokenizer, const Limits& limits) {
  // By their texts: a policy may draw others than the tokens that its text is encoded as.
  const std::string before = tokenizer.decode(context_of(trajectory, prompt)),
                    now = tokenizer.decode(history);
  if (now.starts_with(before)) {
    return append_observed(trajectory, prompt, tokenizer.encode(now.substr(before.size())),
                           std::move(text), limits);
  }
  if (trajectory.is_truncated || std::ssize(trajectory.tokens) >= limits.tokens ||
      std::ssize(history) >= limits.context) {
    trajectory.is_truncated = true;
    return false;
  }
  trajectory.forks.push_back({std::move(history), std::ssize(trajectory.tokens)});
  trajectory.turns.push_back({std::exchange(trajectory.text, {}), std::move(text)});
  return true;
}

Limits limits_of(const config::RunConfig& config) {
  return {config.rollout.max_new_tokens, config.data.max_length};
}

bool take_verdict(Group& group, const Verdict& verdict, const Prompts& prompts,
                  const data::Tokenizer& tokenizer, const Limits& limits) {
  const reward::Score& score = verdict.score;
  Trajectory& trajectory = group.trajectories[verdict.place];
  trajectory.reward += score.reward;
  for (const auto& [name, value] : score.parts) trajectory.parts[name] += value;
  trajectory.is_truncated = trajectory.is_truncated || score.is_truncated;
  if (!score.observation) return false;
  const std::vector<std::int32_t>& prompt = prompts.tokens_of(group);
  if (verdict.messages.empty())
    return add_observation(trajectory, prompt, *score.observation, tokenizer, limits);
  for (const Json& message : verdict.messages) trajectory.messages.push_back(message);
  return add_history(trajectory, prompt, prompts.history(group, trajectory.messages),
                     *score.observation, tokenizer, limits);
}

std::vector<Strand> strands_of(const Trajectory& trajectory,
                               const std::vector<std::int32_t>& prompt) {
  std::vector<Strand> strands = {{&prompt, 0, std::ssize(trajectory.tokens), &trajectory.experts}};
  for (const Fork& fork : trajectory.forks) {
    strands.back().last = fork.first;
    strands.push_back({&fork.prompt, fork.first, std::ssize(trajectory.tokens), &fork.experts});
  }
  return strands;
}

std::vector<std::int32_t> context_of(const Trajectory& trajectory,
                                     const std::vector<std::int32_t>& prompt) {
  const Strand last = strands_of(trajectory, prompt).back();
  std::vector<std::int32_t> tokens = *last.prompt;
  tokens.insert(tokens.end(), trajectory.tokens.begin() + last.first, trajectory.tokens.end());
  return tokens;
}

}  // namespace heddle::rl
