#pragma once

#include <memory>

#include "reward/reward.h"

namespace heddle::reward {

/// Scores by a server: POST of a JSON list of samples (wire.h, with `id`), answered by a list of
/// scores with those ids in any order. What answers 429 or 5xx, or breaks off, is asked again after
/// a wait that doubles, or the server's Retry-After. Throws ConfigError for options out of range.
std::unique_ptr<Reward> make_http_reward(const HttpOptions& options);

}  // namespace heddle::reward
