#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace heddle::rollout {

struct SamplingOptions {
  double temperature = 1;  ///< 0: the most likely token (ties: the lowest id).
  double top_p = 1;        ///< Smallest set of tokens with at least this probability.
  std::int64_t top_k = 0;  ///< 0: all.
  std::uint64_t seed = 0;  ///< The random stream of one request.
};

struct SampledToken {
  std::int32_t id = 0;
  double logprob = 0;  ///< Of the model's own distribution: temperature and cuts do not enter.
};

/// Draws one token from its logits [V]. The log-probability is not finite where the logits are not:
/// the token then means nothing. The random number depends on seed and position (of the
/// token in the output) only.
SampledToken sample(std::span<const float> logits, const SamplingOptions& options,
                    std::uint64_t position);

/// The stream of row `row` (from 0) of a file that has one seed for all.
std::uint64_t seed_of_row(std::uint64_t seed, std::uint64_t row);

}  // namespace heddle::rollout
