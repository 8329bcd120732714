#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace heddle::rollout {

struct SamplingOptions {
  double temperature = 1;  ///< 0: the most likely token (ties: the lowest id).
  double top_p = 1;        ///< Smallest set of tokens with at least this probability.
  std::int64_t top_k = 0;  ///< 0: all.
  std::uint64_t seed = 0;
};

struct SampledToken {
  std::int32_t id = 0;
  double logprob = 0;  ///< Of the model's own distribution: temperature and cuts do not enter.
};

/// Draws one token from its logits [V]. The log-probability is not finite where the logits are not:
/// the token then means nothing. The random number depends on seed, stream (the request) and
/// position only.
SampledToken sample(std::span<const float> logits, const SamplingOptions& options,
                    std::uint64_t stream, std::uint64_t position);

}  // namespace heddle::rollout
