#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace heddle::reward {

/// The tokens of an episode. They are only ever appended to, so the prompt of turn t + 1 begins
/// with all tokens of turn t, and what was sampled is trained as it was sampled. A chat template
/// that renders the history anew would break that: Qwen3.5's drops earlier reasoning.
class Transcript {
 public:
  /// Tokens that the environment, a tool or the prompt gave; not trained.
  void observe(std::span<const std::int64_t> tokens) { append(tokens, false); }
  /// Tokens that the policy sampled.
  void act(std::span<const std::int64_t> tokens) { append(tokens, true); }

  const std::vector<std::int64_t>& tokens() const { return tokens_; }
  /// For each token, whether the policy sampled it: from who gave it, never from its text.
  const std::vector<std::uint8_t>& mask() const { return mask_; }

  /// For callers that render a whole prompt anew: takes what `rendered` has beyond tokens() as an
  /// observation. False, and nothing taken, if it does not begin with tokens(); that turn then
  /// begins a new training row (a fork).
  bool extend_to(std::span<const std::int64_t> rendered);

 private:
  void append(std::span<const std::int64_t> tokens, bool is_sampled);

  std::vector<std::int64_t> tokens_;
  std::vector<std::uint8_t> mask_;
};

}  // namespace heddle::reward
