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
  if (turn.experts.size() > trajectory.experts.size()) {
    trajectory.experts.insert(
        trajectory.experts.end(),
        turn.experts.begin() + static_cast<std::ptrdiff_t>(trajectory.experts.size()),
        turn.experts.end());
  }
  if (!trajectory.sampled.empty()) trajectory.sampled.resize(trajectory.tokens.size(), 1);
  trajectory.text = std::move(turn.text);
  trajectory.is_truncated = turn.finish_reason == rollout::FinishReason::kLength;
}

bool add_observation(Trajectory& trajectory, std::string text, const data::Tokenizer& tokenizer,
                     std::int64_t most) {
  std::vector<std::int32_t> tokens = tokenizer.encode(text);
  const std::size_t count = tokens.size();
  if (trajectory.is_truncated || std::ssize(trajectory.tokens) + std::ssize(tokens) >= most) {
    trajectory.is_truncated = true;
    return false;
  }
  trajectory.sampled.resize(trajectory.tokens.size(), 1);
  trajectory.sampled.resize(trajectory.tokens.size() + count, 0);
  // Nothing reads these of tokens that nobody drew, but each token has its place in every column.
  trajectory.logprobs.resize(trajectory.tokens.size() + count);
  const std::int64_t version = trajectory.versions.back();
  trajectory.versions.resize(trajectory.tokens.size() + count, version);
  if (!trajectory.supports.empty()) {
    for (const std::int32_t token : tokens) trajectory.supports.push_back({token});
  }
  append(trajectory.tokens, std::move(tokens));
  trajectory.turns.push_back({std::exchange(trajectory.text, {}), std::move(text)});
  return true;
}

}  // namespace heddle::rl
