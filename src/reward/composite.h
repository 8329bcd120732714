#pragma once

#include <memory>
#include <vector>

#include "reward/reward.h"

namespace heddle::reward {

/// Built-in verifiers with weights. The verifier `row` of a part is the one that each row names in
/// its column `verifier`. Throws ConfigError.
std::unique_ptr<Reward> make_composite(const std::vector<Part>& parts, Combine combine);

}  // namespace heddle::reward
