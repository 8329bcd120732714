#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace heddle::rl {

/// A turn: text that the policy wrote, and the answer to it.
struct Turn {
  std::string completion, observation;
  bool operator==(const Turn&) const = default;
};

/// Where the chat template rendered the conversation anew and what came was no continuation: the
/// tokens from there on follow another prompt, in a row of their own.
struct Fork {
  std::vector<std::int32_t> prompt = {};
  std::int64_t first = 0;                   ///< The first token of the trajectory that follows it.
  std::vector<std::uint16_t> experts = {};  ///< For the prompt and what follows, as Trajectory's.
  bool operator==(const Fork&) const = default;
};

/// One completion as it was drawn, and what it is worth. With several turns it is all of them, with
/// the observations between: tokens that the policy did not draw.
struct Trajectory {
  std::vector<std::int32_t> tokens = {};    ///< For the completion, its end token included.
  std::vector<double> logprobs = {};        ///< [tokens] of the policy that drew them.
  std::vector<std::int64_t> versions = {};  ///< [tokens] of the weights that drew them.
  /// [tokens] ids that each was drawn from; empty: from all.
  std::vector<std::vector<std::int32_t>> supports = {};
  /// The experts that prompt and tokens chose but for the last, see rollout::Completion, up to the
  /// first fork; empty where they are not replayed.
  std::vector<std::uint16_t> experts = {};
  /// [tokens] whether the policy drew it: from who gave it, never from its text. Empty: all.
  std::vector<std::uint8_t> sampled = {};
  std::vector<Turn> turns = {};  ///< Earlier turns.
  std::vector<Fork> forks = {};  ///< In their order; rl.history render alone makes some.
  /// Messages after the prompt, while it is drawn; with rl.history render.
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  std::string text = {};      ///< Text of the last turn.
  bool is_truncated = false;  ///< Ended at the limit of its length.
  double reward = 0;          ///< Value that the verifier gave.
  std::map<std::string, double> parts = {};

  bool is_sampled(std::size_t token) const { return sampled.empty() || sampled[token] != 0; }
  std::int64_t sampled_tokens() const {
    return sampled.empty() ? std::ssize(tokens) : std::ranges::count(sampled, 1);
  }
};

/// The prompt of an environment's episodes, where it is not the row's.
struct Opening {
  std::vector<std::int32_t> tokens = {};
  std::string text = {};  ///< Decoded without special tokens.
  /// Its conversation, see Prompt::messages, while the episodes run.
  nlohmann::ordered_json messages = nullptr;
};

/// A prompt and its trajectories: what is dispatched, judged and trained on as one.
struct Group {
  std::int64_t cursor = 0;  ///< Its place in the stream of prompts, and its name.
  std::int64_t attempt = 0;
  std::int64_t row = 0;  ///< For the prompts.
  std::vector<Trajectory> trajectories = {};
  std::optional<Opening> opening = {};

  /// Tokens that the policy drew.
  std::int64_t sampled_tokens() const {
    std::int64_t sum = 0;
    for (const Trajectory& t : trajectories) sum += t.sampled_tokens();
    return sum;
  }
  /// Oldest weights that drew one of its tokens.
  std::int64_t oldest_version() const {
    std::int64_t oldest = std::numeric_limits<std::int64_t>::max();
    for (const Trajectory& t : trajectories) {
      for (const std::int64_t version : t.versions) oldest = std::min(oldest, version);
    }
    return oldest;
  }
  /// Newest weights that drew one of its tokens.
  std::int64_t newest_version() const {
    std::int64_t newest = std::numeric_limits<std::int64_t>::min();
    for (const Trajectory& t : trajectories) {
      for (const std::int64_t version : t.versions) newest = std::max(newest, version);
    }
    return newest;
  }
  /// All its rewards are the same: it teaches nothing.
  bool is_uniform() const {
    return std::ranges::all_of(
        trajectories, [&](const Trajectory& t) { return t.reward == trajectories.front().reward; });
  }
};

}  // namespace heddle::rl
