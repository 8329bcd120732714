#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace heddle::rl {

/// One completion as it was drawn, and what it is worth.
struct Trajectory {
  std::vector<std::int32_t> tokens = {};    ///< For the completion, its end token included.
  std::vector<double> logprobs = {};        ///< [tokens] of the policy that drew them.
  std::vector<std::int64_t> versions = {};  ///< [tokens] of the weights that drew them.
  /// [tokens] ids that each was drawn from; empty: from all.
  std::vector<std::vector<std::int32_t>> supports = {};
  std::string text = {};
  bool is_truncated = false;  ///< Ended at the limit of its length.
  double reward = 0;          ///< As the verifier gave it.
  std::map<std::string, double> parts = {};
};

/// A prompt and its trajectories: what is dispatched, judged and trained on as one.
struct Group {
  std::int64_t cursor = 0;  ///< Its place in the stream of prompts, and its name.
  std::int64_t attempt = 0;
  std::int64_t row = 0;  ///< For the prompts.
  std::vector<Trajectory> trajectories = {};

  std::int64_t tokens() const {
    std::int64_t sum = 0;
    for (const Trajectory& t : trajectories) sum += std::ssize(t.tokens);
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
  /// All its rewards are the same: it teaches nothing.
  bool is_uniform() const {
    return std::ranges::all_of(
        trajectories, [&](const Trajectory& t) { return t.reward == trajectories.front().reward; });
  }
};

}  // namespace heddle::rl
